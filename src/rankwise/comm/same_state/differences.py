# SPDX-License-Identifier: Apache-2.0
"""What differs between the reports of ranks: hyperparameters, and values by more than rounding. Sends nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rankwise.tensors.checksum import is_rounding, is_same_setting, tolerance

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch

    Summary = Sequence[float]
    """What :func:`rankwise.tensors.checksum.summary_of` returns, perhaps read from JSON."""

MOST_NAMES = 5


def listed(names: Sequence[str]) -> str:
    """Return the first of several names, for an error."""
    return ", ".join(names[:MOST_NAMES]) + (", ..." if len(names) > MOST_NAMES else "")


def first_unlike_setting(
    of_ranks: Iterable[Sequence[Mapping[str, Any]]],
) -> tuple[int, str, list[object]] | None:
    """Return the first setting that differs: its place in the lists, its key, and the value of each rank.

    Args:
        of_ranks: for each rank a list of settings by key, such as those of parameter groups. A key or an entry that a
            rank lacks counts as equal to the first rank's.
    """
    first, *others = of_ranks
    for number, settings in enumerate(first):
        rows = [settings, *(other[number] if number < len(other) else {} for other in others)]
        for key, value in settings.items():
            held = [row.get(key, value) for row in rows]
            if any(not is_same_setting(one, value) for one in held):
                return number, key, held
    return None


def unlike_summaries(of_ranks: Iterable[Sequence[Summary | None]], dtypes: Iterable[torch.dtype]) -> list[int]:
    """Return the places of the summaries that differ from the first rank's by more than rounding.

    Args:
        of_ranks: for each rank the summaries of its tensors, ``None`` for a tensor that it lacks.
        dtypes: of these tensors.
    """
    found: list[int] = []
    for number, (dtype, (first, *others)) in enumerate(zip(dtypes, zip(*of_ranks, strict=True), strict=True)):
        for other in others:
            if first is None or other is None:
                is_same = first is other
            else:
                is_same = is_rounding((first[0], first[1]), (other[0], other[1]), tolerance(dtype))
            if not is_same:
                found.append(number)
                break
    return found
