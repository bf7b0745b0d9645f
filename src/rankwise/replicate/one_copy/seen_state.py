# SPDX-License-Identifier: Apache-2.0
"""Whether an optimizer's state holds other values than when it was looked at last, in one quick pass."""

from __future__ import annotations

from itertools import chain
from operator import is_
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.optim.optimizer import Optimizer


class SeenState:
    """The values of an optimizer's state when they were looked at last."""

    def __init__(self) -> None:
        self._values: Sequence[object] = (self,)

    def look(self, optimizer: Optimizer, more: Sequence[bool] = ()) -> bool:
        """Look again; return whether some values, or ``more``, are others than before. Writes are not noticed."""
        states = [state for state in optimizer.state.values() if isinstance(state, dict)]
        values = [*chain.from_iterable(map(dict.values, states)), *more]
        if len(values) == len(self._values) and all(map(is_, values, self._values)):
            return False
        self._values = values
        return True
