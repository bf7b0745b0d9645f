# SPDX-License-Identifier: Apache-2.0
"""Warnings of random numbers that each rank draws for itself.

In a training loop outside ``as_one_rank()``, one row at a time, and by dropout that rankwise cannot see.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from typing import TYPE_CHECKING

from torch import nn

from rankwise.comm.session import current_or_none
from rankwise.errors import ConfigurationError
from rankwise.health.call_site import user_call_site, words
from rankwise.log import warn
from rankwise.torch_private.compiler import OWN_RANDOMNESS_OFF

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import CodeType

    from rankwise.comm.current_batch import CurrentBatch


_noticed: set[str] = set()
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


class _OneByOne:
    """How often each line has drawn a single row since the loop took its batch."""

    def __init__(self) -> None:
        self._batch: CurrentBatch | None = None
        self._counts: Counter[str] = Counter()

    def count(self, batch: CurrentBatch, place: str) -> None:
        """Count a draw; warn of the batch before if a line has drawn once for each of its samples."""
        before = self._batch
        if batch is not before:
            if before is not None and 1 < before.num < before.num_global:
                for line, times in self._counts.items():
                    if times == before.num:
                        _warn_of_single_rows(line, times)
            self._batch = batch
            self._counts.clear()
        self._counts[place] += 1

    def forget(self) -> None:
        self._batch = None
        self._counts.clear()


_one_by_one = _OneByOne()


def notice(operation: str, shape: Sequence[int]) -> None:
    """Warn once per line that draws as many rows as this rank has samples: one rank would draw other numbers."""
    session = current_or_none()
    if session is not None and session.batches.reads:
        if session.batches.reads == "batches" and session.world.world_size > 1:
            _warn_of_reading(words(user_call_site()))
        return
    if session is None or session.batches.current is None:
        return
    if math.prod(shape) == 1:
        _one_by_one.count(session.batches.current, words(user_call_site()))
        return
    rows = next(
        (one for one in session.batches.in_use.values() if one.num == shape[0] and 1 < one.num < one.num_global), None
    )
    if rows is None or (place := words(user_call_site())) in _noticed:
        return
    _noticed.add(place)
    warn(
        f"{operation.partition('.')[0].strip('_')} at {place} draws {rows.num} rows, as many as this rank has "
        "samples: each rank draws its own (the same ones if the seeds are equal) instead of its part of what "
        "one rank would draw; run that line within `with rankwise.as_one_rank():`"
    )


def notice_in_block(numbers_of_one: int, num_samples: int) -> None:
    """Warn once per line if a block has drawn as many single numbers as this rank has samples."""
    if numbers_of_one == num_samples > 1:
        _warn_of_single_rows(words(user_call_site()), num_samples)


class SinglesInBlock:
    """How often each call in the code has drawn one number from NumPy's or Python's global generator in a block."""

    def __init__(self) -> None:
        # By instruction and not by line: one line may draw for the batch twice.
        self._counts: dict[tuple[CodeType, int], tuple[int, str]] = {}

    def count(self) -> None:
        """Count a draw. Called by the functions that :func:`replacing` puts in place."""
        frame = sys._getframe(3)  # noqa: SLF001 - the only way to see the callers without a traceback
        key = frame.f_code, frame.f_lasti
        times, place = self._counts.get(key) or (0, words(user_call_site()))
        self._counts[key] = times + 1, place

    def notice(self, num_samples: int) -> None:
        """Warn once per line that has drawn as many numbers as there are samples, one by one."""
        for times, place in self._counts.values():
            if times == num_samples > 1:
                _warn_of_single_rows(place, times)


def permutes_a_part(function: str, rows: CurrentBatch) -> ConfigurationError:
    """Return the error of a function that permutes as many values as this rank has samples."""
    return ConfigurationError(
        f"{function} at {words(user_call_site())} permutes this rank's samples among themselves.",
        evidence=f"this rank has {rows.num} of {rows.num_global} samples; one rank would permute all of them",
        do="gather the batch (rankwise.all_gather_uneven), permute it, and take this rank's rows",
    )


def _warn_of_reading(place: str) -> None:
    if place not in _noticed:
        _noticed.add(place)
        warn(
            f"{place} draws random numbers for the samples that this rank has of a batch (in collate_fn or "
            "__getitems__): other ranks draw others, and the result depends on the number of ranks; draw them in the "
            "dataset's __getitem__, where they are seeded by sample"
        )


def _warn_of_single_rows(place: str, times: int) -> None:
    if place not in _noticed:
        _noticed.add(place)
        warn(
            f"{place} drew {times} random numbers one at a time, as many as this rank has samples: they differ "
            "from those that one rank would draw for these samples; draw them in one call of torch or "
            "numpy.random, with as many rows as samples, inside `with rankwise.as_one_rank():`"
        )


def warn_of_rejection(operation: str) -> None:
    """Warn once per line whose draws cannot have torch's numbers with ``randomness="torch"``."""
    place = words(user_call_site())
    if place not in _noticed:
        _noticed.add(place)
        warn(
            f"{operation.strip('_')} at {place} uses a number of random numbers that depends on the values, which "
            "differ between ranks: its numbers depend on the position and differ from torch's"
        )


def warn_of_own_rows(place: str, shape: Sequence[int], num_samples: int) -> None:
    """Warn once per line that draws for rows of which it is not known which sample each belongs to."""
    if place not in _noticed:
        _noticed.add(place)
        warn(
            f"the random numbers at {place}, of shape {list(shape)}, are for rows that cannot be followed from the "
            f"{num_samples} samples of this rank: a run on a different number of ranks differs as a run with a "
            'different seed would; draw where there is one row per sample, or pass randomness="per_rank" to '
            "replicate() if that is intended"
        )


def forget_notices() -> None:
    """Warn again."""
    _noticed.clear()
    _one_by_one.forget()


def warn_of_dropout(model: nn.Module) -> None:
    """Warn that the result depends on the number of ranks if a layer of ``model`` in training uses dropout."""
    names = [name or type(module).__name__ for name, module in model.named_modules() if _drops(module)]
    if names:
        draws = "draws its own mask" if len(names) == 1 else f"and {len(names) - 1} more layers draw their own masks"
        warn(
            f"{names[0]} {draws} on each rank (dropout) in compiled code or fused kernels, so a run on a "
            "different number of ranks differs as a run with a different seed would; compiled code draws as on "
            f"one rank with {OWN_RANDOMNESS_OFF} = True"
        )


def _drops(module: nn.Module) -> bool:
    if not module.training:
        return False
    if isinstance(module, _DROPOUTS):
        return module.p > 0
    if isinstance(module, nn.MultiheadAttention):
        return module.dropout > 0
    return isinstance(module, nn.RNNBase) and module.dropout > 0 and module.num_layers > 1
