# SPDX-License-Identifier: Apache-2.0
"""The reductions, by Horovod's names and numbers."""

from __future__ import annotations

import warnings
from enum import IntEnum

from rankwise.errors import ConfigurationError


class ReduceOp(IntEnum):
    """How the values of all ranks are combined."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5


Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Adasum = ReduceOp.ADASUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT


def chosen_op(op: int | None, average: bool | None) -> ReduceOp:  # noqa: FBT001 - Horovod's old argument
    """Return the reduction of ``op`` or of the older ``average``; the average by default."""
    if op is not None:
        if average is not None:
            raise ConfigurationError("op= and average= were both given.", do="pass op= only: hvd.Average or hvd.Sum")
        return known_op(op)
    if average is not None:
        # Begins as Horovod's, which people filter on.
        message = "Parameter `average` has been replaced with `op`. Pass op=hvd.Average or op=hvd.Sum."
        warnings.warn(message, DeprecationWarning, stacklevel=3)
        return Average if average else Sum
    return Average


def known_op(op: int) -> ReduceOp:
    """Return the reduction of a number; raise if it is unknown."""
    try:
        return ReduceOp(op)
    except ValueError:
        raise ConfigurationError(
            f"Unknown reduction {op!r}.", do="use hvd.Average, Sum, Adasum, Min, Max or Product"
        ) from None
