# SPDX-License-Identifier: Apache-2.0
"""Mistakes that show in the run on N ranks without comparing numbers: in samples, random numbers and files.

Values only; imports no torch. One function per mistake.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankwise.errors import fold_ranks
from rankwise.tools.verify.evidence import Cause

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rankwise.tools.verify.records import Batch, Loader, RankRun, Step

LEAST_SAMPLES = 8
"""How many samples in the same order are no coincidence."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A mistake that shows in one run of N ranks alone."""

    step: int
    """From which step on; 0: no step."""
    cause: Cause


def findings(one: RankRun, many: Sequence[RankRun]) -> Iterator[Finding]:
    """Yield the mistakes that show without comparing numbers, those of the data first."""
    for look in (_same_samples, _unsharded, _repeated, _same_order, _equal_draws, _written_twice):
        finding = look(one, many)
        if finding is not None:
            yield finding


_SHARD = (
    "pass sampler=torch.utils.data.DistributedSampler(dataset) and leave out shuffle, or use "
    "rankwise.DataLoader(dataset, global_batch_size=...)"
)


def _same_samples(one: RankRun, many: Sequence[RankRun]) -> Finding | None:  # noqa: ARG001 - as the others
    steps = list(zip(*(rank.steps for rank in many), strict=False))
    if not steps or not all(step.inputs for step in steps[0]):
        return None
    if not all(map(_are_alike, steps)):
        return None
    loader = _loader(many[0], steps[0][0])
    return Finding(
        1,
        Cause(
            "same samples",
            "every rank trains on the same samples in every step",
            _SHARD,
            line="" if loader is None else loader.line,
        ),
    )


def _are_alike(steps: Sequence[Step]) -> bool:
    """Return whether all ranks pass the same samples in a step, as where each trains a model of its own first."""
    first = Counter(steps[0].inputs)
    return all(Counter(step.inputs) == first for step in steps)


def _unsharded(one: RankRun, many: Sequence[RankRun]) -> Finding | None:
    """Each rank goes through the whole dataset, in an order of its own."""
    if not one.steps or any(not rank.steps for rank in many) or _are_alike([rank.steps[0] for rank in many]):
        return None
    total = sum(rank.steps[0].rows for rank in many)
    mine, theirs = _loader(one, one.steps[0]), _loader(many[0], many[0].steps[0])
    if mine is None or theirs is None or total != len(many) * one.steps[0].rows or not one.steps[0].rows:
        return None
    is_whole = mine.length == theirs.length and mine.length is not None and mine.length > 1
    if not is_whole or mine.batch_size != theirs.batch_size:
        return None
    return Finding(
        1,
        Cause(
            "same samples",
            f"every rank goes through the whole dataset: its loader has {theirs.length} batches, as on one rank",
            _SHARD,
            line=theirs.line,
        ),
    )


def _repeated(one: RankRun, many: Sequence[RankRun]) -> Finding | None:
    """Samples that several ranks have in one epoch, or one rank twice."""
    if any(count > 1 for counts in _epochs(one).values() for count in counts.values()):
        return None
    seen: dict[tuple[int, int], Counter[int]] = {}
    steps = list(zip(*(rank.steps for rank in many), strict=False))
    for number, held in enumerate(steps, start=1):
        # Batches that each rank cuts by itself are the same on all ranks.
        if all(_digests(step) == _digests(held[0]) for step in held):
            continue
        for step in held:
            for batch in _trained(step):
                counts = seen.setdefault((batch.loader, batch.epoch), Counter())
                counts.update(batch.digests)
        twice = sum(count - 1 for counts in seen.values() for count in counts.values())
        if twice:
            return Finding(
                number,
                Cause(
                    "repeated samples",
                    f"{twice} sample{'s' * (twice > 1)} of an epoch counted twice: the sampler repeats samples "
                    "to give every rank as many",
                    "rankwise.DataLoader, which splits the last batch evenly; or drop_last=True",
                    line=_line_of_loader(many[0], held[0]),
                ),
            )
    return None


def _trained(step: Step) -> list[Batch]:
    return [batch for batch in step.batches if batch.is_trained]


def _digests(step: Step) -> Counter[int]:
    return Counter(digest for batch in step.batches for digest in batch.digests)


def _epochs(rank: RankRun) -> dict[tuple[int, int], Counter[int]]:
    found: dict[tuple[int, int], Counter[int]] = {}
    for step in rank.steps:
        for batch in _trained(step):
            found.setdefault((batch.loader, batch.epoch), Counter()).update(batch.digests)
    return found


def _same_order(one: RankRun, many: Sequence[RankRun]) -> Finding | None:  # noqa: ARG001 - as the others
    """A sampler that shuffles gives the same order in two epochs."""
    rank = many[0]
    for loader in rank.loaders:
        orders: dict[int, list[int]] = {}
        first_steps: dict[int, int] = {}
        for step in rank.steps:
            for batch in _trained(step):
                if batch.loader == loader.number:
                    orders.setdefault(batch.epoch, []).extend(batch.digests)
                    first_steps.setdefault(batch.epoch, step.number)
        if len(orders) == 1 or not orders:
            continue
        first, second = list(orders.values())[:2]
        shared = min(len(first), len(second))
        if loader.shuffles and shared >= LEAST_SAMPLES and first[:shared] == second[:shared]:
            return Finding(
                list(first_steps.values())[1],
                Cause(
                    "same order",
                    f"{loader.sampler} shuffles, but gives the second epoch in the order of the first",
                    "call sampler.set_epoch(epoch) at the start of every epoch; rankwise.DataLoader needs no such call",
                    line=loader.line,
                ),
            )
    return None


def _equal_draws(one: RankRun, many: Sequence[RankRun]) -> Finding | None:  # noqa: ARG001 - as the others
    """All ranks draw the same numbers for different samples while they read."""
    for held in zip(*(rank.steps for rank in many), strict=False):
        for batches in zip(*(step.batches for step in held), strict=False):
            states = {batch.drawn for batch in batches}
            samples = {batch.digests for batch in batches}
            if len(states) == 1 and len(samples) == len(batches) and batches[0].drawn:
                return Finding(
                    held[0].number,
                    Cause(
                        "equal augmentations",
                        "all ranks draw the same random numbers while they read different samples: their samples are "
                        "augmented alike",
                        "seed with seed + rank once the model is built, or use rankwise.DataLoader, which seeds by "
                        "sample",
                        line=_line_of_loader(many[0], held[0]),
                    ),
                )
    return None


def _written_twice(one: RankRun, many: Sequence[RankRun]) -> Finding | None:  # noqa: ARG001 - as the others
    ranks_of: dict[str, list[int]] = {}
    lines: dict[str, str] = {}
    for rank in many:
        for written in rank.written:
            ranks_of.setdefault(written.path, []).append(rank.facts.rank)
            lines.setdefault(written.path, written.line)
    shared = {path: ranks for path, ranks in ranks_of.items() if len(ranks) > 1}
    if not shared:
        return None
    path, ranks = next(iter(shared.items()))
    return Finding(
        0,
        Cause(
            "written twice",
            f"{path} is written by {fold_ranks(ranks)}, which overwrite each other's data",
            "write on rank 0 only, `if rank == 0:`, or put the rank into the name",
            line=lines[path],
        ),
    )


def _loader(rank: RankRun, step: Step) -> Loader | None:
    number = next((batch.loader for batch in step.batches), None)
    return next((loader for loader in rank.loaders if loader.number == number), None)


def _line_of_loader(rank: RankRun, step: Step) -> str:
    loader = _loader(rank, step)
    return "" if loader is None else loader.line
