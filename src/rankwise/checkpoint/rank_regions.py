# SPDX-License-Identifier: Apache-2.0
"""The state on all ranks: the regions of each tensor and their ranks, and the entries of each optimizer.

Pure: takes the reports of all ranks, and returns the same on every rank.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rankwise.checkpoint.manifest import Region, tiles, whole
from rankwise.errors import CheckpointError, fold_ranks, fold_values

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_NOTHING_WRITTEN = "nothing was written"


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorLayout:
    """One tensor over all ranks."""

    dtype: str
    """As torch names it, without ``torch.``."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    holders: Mapping[Region, Sequence[int]]
    """Regions that cover it, and the ranks that hold each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateReport:
    """One rank's report of its state, which is sent to the others as JSON."""

    tensors: dict[str, tuple[str, tuple[int, ...], Region | None]]
    """Dtype, whole shape, and the region that lies here, by name."""
    entries: dict[str, list[Any]]
    """Entries of each optimizer's state that lie here: keys and skeletons."""
    elsewhere: dict[str, list[int]]
    """Numbers of each optimizer's parameters that lie on other ranks only."""

    def as_json(self) -> list[Any]:
        """Return what :func:`report_of` reads."""
        tensors = {
            name: [dtype, list(shape), region and [list(region.offsets), list(region.shape)]]
            for name, (dtype, shape, region) in self.tensors.items()
        }
        return [tensors, self.entries, self.elsewhere]


def report_of(sections: list[Any]) -> StateReport:
    """Return the report of another rank."""
    tensors, entries, elsewhere = sections
    return StateReport(
        tensors={
            name: (dtype, tuple(shape), Region(tuple(held[0]), tuple(held[1])) if held else None)
            for name, (dtype, shape, held) in tensors.items()
        },
        entries=entries,
        elsewhere=elsewhere,
    )


def layouts_of(reports: Sequence[StateReport]) -> dict[str, TensorLayout]:
    """Return how each tensor lies on the ranks.

    Raises:
        CheckpointError: ranks disagree about a tensor, or part of one lies on no rank.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, report in enumerate(reports):
        for name in report.tensors:
            ranks_of.setdefault(name, []).append(rank)
    return {name: _layout(name, {rank: reports[rank].tensors[name] for rank in ranks_of[name]}) for name in ranks_of}


def _layout(name: str, reported: Mapping[int, tuple[str, tuple[int, ...], Region | None]]) -> TensorLayout:
    texts = {rank: f"{dtype}{list(shape)}" for rank, (dtype, shape, _) in reported.items()}
    if len(set(texts.values())) > 1:
        raise differs(name, texts)
    dtype, shape, _ = next(iter(reported.values()))
    holders: dict[Region, list[int]] = {}
    for rank, (_, _, region) in reported.items():
        if region is not None:
            holders.setdefault(region, []).append(rank)
    everything = whole(shape)
    if everything in holders:
        return TensorLayout(dtype=dtype, shape=shape, holders={everything: holders[everything]})
    if not tiles(list(holders), shape):
        raise _incomplete(name, texts, holders)
    return TensorLayout(dtype=dtype, shape=shape, holders=holders)


def _incomplete(name: str, texts: Mapping[int, str], holders: Mapping[Region, Sequence[int]]) -> CheckpointError:
    if not holders:
        return CheckpointError(
            f"{name} cannot be saved: it is on the meta device on every rank.",
            evidence=f"{fold_values(texts)}\n{_NOTHING_WRITTEN}",
            do="allocate and fill the model first: model.to_empty(device=...), then load or initialise it",
        )
    found = "\n".join(
        f"{fold_ranks(ranks)}: [{bounds(region)}]"
        for region, ranks in sorted(holders.items(), key=lambda item: item[0].offsets)
    )
    return CheckpointError(
        f"{name} cannot be saved: the regions on the ranks do not cover all of {min(texts.items())[1]}.",
        evidence=f"{found}\n{_NOTHING_WRITTEN}",
        do="place it the same way on every rank, so that each element lies in one region",
    )


def bounds(region: Region) -> str:
    """Return a region as slices: ``0:5,2:4``."""
    return ",".join(f"{start}:{start + size}" for start, size in zip(region.offsets, region.shape, strict=True))


def united_entries(name: str, reports: Sequence[StateReport]) -> list[Any]:
    """Return the entries of an optimizer's state over all ranks.

    An entry is missing on a rank only if its parameter lies on other ranks.

    Raises:
        CheckpointError: ranks hold different entries for one parameter, or one lacks an entry of a parameter it has.
    """
    united: dict[str, Any] = {}
    texts_of: dict[str, dict[int, str]] = {}
    for rank, report in enumerate(reports):
        for key, item in report.entries[name]:
            united.setdefault(json.dumps(key), [key, item])
            texts_of.setdefault(json.dumps(key), {})[rank] = json.dumps(item)
    for text, texts in texts_of.items():
        for rank, report in enumerate(reports):
            if rank not in texts and united[text][0] not in report.elsewhere[name]:
                texts[rank] = "absent"
        if len(set(texts.values())) > 1:
            raise differs(f"{name}.state[{text}]", texts)
    return list(united.values())


def differs(path: str, texts: Mapping[int, str]) -> CheckpointError:
    """Return the error for state that differs between ranks at ``path``, with the text of each rank there."""
    return CheckpointError(
        f"The state to save differs between ranks: {path}.",
        evidence=f"{fold_values(texts)}\n{_NOTHING_WRITTEN}",
        do="save only what is the same on every rank; all_reduce() a rank's own number first, or leave it out",
    )
