# SPDX-License-Identifier: Apache-2.0
"""Mistakes that other things than the first difference show: samples, random numbers, files, and values that are kept.

Values only; imports no torch. One function per mistake.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankwise.errors import fold_ranks
from rankwise.verify.compare import Cause, is_near, samples

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rankwise.verify.compare import Evidence
    from rankwise.verify.records import Batch, Loader, RankRun, Sketch, Step

LEAST_SAMPLES = 8
"""How many samples in the same order are no coincidence."""
_SHARD = (
    "pass sampler=torch.utils.data.DistributedSampler(dataset) and leave out shuffle, or use "
    "rankwise.DataLoader(dataset, global_batch_size=...)"
)


@dataclass(frozen=True, slots=True)
class Mistake:
    """A mistake that shows in one run of N ranks alone."""

    step: int
    """From which step on; 0: no step."""
    cause: Cause


def findings(one: RankRun, many: Sequence[RankRun]) -> Iterator[Mistake]:
    """Yield the mistakes that show without comparing numbers, those of the data first."""
    steps = list(zip(*(rank.steps for rank in many), strict=False))
    loaders = many[0].loaders
    if steps:
        yield from _same_samples(one, many, steps)
        if all(count == 1 for counts in _epochs(one).values() for count in counts.values()):
            yield from _repeated(steps, loaders)
    for loader in loaders:
        yield from _same_order(many[0], loader)
    yield from _equal_draws(steps, loaders)
    yield from _written_twice(many)


def _same_samples(one: RankRun, many: Sequence[RankRun], steps: Sequence[Sequence[Step]]) -> Iterator[Mistake]:
    first = steps[0]
    loader = _loader(many[0].loaders, first[0])
    line = "" if loader is None else loader.line
    if all(step.inputs for step in first) and all(map(_are_alike, steps)):
        yield Mistake(
            1, Cause("same samples", "every rank trains on the same samples in every step", _SHARD, line=line)
        )
    # Or each rank goes through the whole dataset, in an order of its own.
    rows = one.steps[0].rows if one.steps else 0
    mine = _loader(one.loaders, one.steps[0]) if rows else None
    if mine is None or loader is None or _are_alike(first) or sum(step.rows for step in first) != len(many) * rows:
        return
    is_whole = mine.length == loader.length and mine.length is not None and mine.length > 1
    if is_whole and mine.batch_size == loader.batch_size:
        words = f"every rank goes through the whole dataset: its loader has {loader.length} batches, as on one rank"
        yield Mistake(1, Cause("same samples", words, _SHARD, line=line))


def _are_alike(steps: Sequence[Step]) -> bool:
    """Return whether all ranks pass the same samples in a step, as where each trains a model of its own first."""
    first = Counter(steps[0].inputs)
    return all(Counter(step.inputs) == first for step in steps)


def _repeated(steps: Sequence[Sequence[Step]], loaders: Sequence[Loader]) -> Iterator[Mistake]:
    """Samples that several ranks have in one epoch, or one rank twice."""
    seen: dict[tuple[int, int], Counter[int]] = {}
    for number, held in enumerate(steps, start=1):
        # Batches that each rank cuts by itself are the same on all ranks.
        loaded = [samples([step]) for step in held]
        if all(counts == loaded[0] for counts in loaded):
            continue
        for step in held:
            _count(step, seen)
        twice = sum(count - 1 for counts in seen.values() for count in counts.values())
        if twice:
            words = (
                f"{twice} sample{'s' * (twice > 1)} of an epoch counted twice: the sampler repeats samples to give "
                "every rank as many"
            )
            fix = "rankwise.DataLoader, which splits the last batch evenly; or drop_last=True"
            yield Mistake(number, Cause("repeated samples", words, fix, line=_line_of_loader(loaders, held[0])))
            return


def _epochs(rank: RankRun) -> dict[tuple[int, int], Counter[int]]:
    found: dict[tuple[int, int], Counter[int]] = {}
    for step in rank.steps:
        _count(step, found)
    return found


def _count(step: Step, epochs: dict[tuple[int, int], Counter[int]]) -> None:
    """Add the samples of a step to those of the epochs of their loaders."""
    for batch in _trained(step):
        epochs.setdefault((batch.loader, batch.epoch), Counter()).update(batch.digests)


def _trained(step: Step) -> list[Batch]:
    return [batch for batch in step.batches if batch.is_trained]


def _same_order(rank: RankRun, loader: Loader) -> Iterator[Mistake]:
    """A sampler that shuffles gives the same order in two epochs."""
    orders: dict[int, list[int]] = {}
    first_steps: dict[int, int] = {}
    for step in rank.steps:
        for batch in _trained(step):
            if batch.loader == loader.number:
                orders.setdefault(batch.epoch, []).extend(batch.digests)
                first_steps.setdefault(batch.epoch, step.number)
    if len(orders) > 1 and loader.shuffles:
        first, second = list(orders.values())[:2]
        shared = min(len(first), len(second))
        if shared >= LEAST_SAMPLES and first[:shared] == second[:shared]:
            cause = Cause(
                "same order",
                f"{loader.sampler} shuffles, but gives the second epoch in the order of the first",
                "call sampler.set_epoch(epoch) at the start of every epoch; rankwise.DataLoader needs no such call",
                line=loader.line,
            )
            yield Mistake(list(first_steps.values())[1], cause)


def _equal_draws(steps: Sequence[Sequence[Step]], loaders: Sequence[Loader]) -> Iterator[Mistake]:
    """All ranks draw the same numbers for different samples while they read."""
    for held in steps:
        for batches in zip(*(step.batches for step in held), strict=False):
            states = {batch.drawn for batch in batches}
            samples = {batch.digests for batch in batches}
            if len(states) == 1 and len(samples) == len(batches) and batches[0].drawn:
                cause = Cause(
                    "equal augmentations",
                    "all ranks draw the same random numbers while they read different samples: their samples are "
                    "augmented alike",
                    "seed with seed + rank once the model is built, or use rankwise.DataLoader, which seeds by sample",
                    line=_line_of_loader(loaders, held[0]),
                )
                yield Mistake(held[0].number, cause)
                return


def _written_twice(many: Sequence[RankRun]) -> Iterator[Mistake]:
    found = [(written, rank.facts.rank) for rank in many for written in rank.written]
    for written, _ in found:
        ranks = [rank for other, rank in found if other.path == written.path]
        if len(ranks) > 1:
            cause = Cause(
                "written twice",
                f"{written.path} is written by {fold_ranks(ranks)}, which overwrite each other's data",
                "write on rank 0 only, `if rank == 0:`, or put the rank into the name",
                line=written.line,
            )
            yield Mistake(0, cause)
            return


def _loader(loaders: Sequence[Loader], step: Step) -> Loader | None:
    number = next((batch.loader for batch in step.batches), None)
    return next((loader for loader in loaders if loader.number == number), None)


def _line_of_loader(loaders: Sequence[Loader], step: Step) -> str:
    loader = _loader(loaders, step)
    return "" if loader is None else loader.line


def loaded_apart(one: RankRun, many: Sequence[RankRun]) -> Cause | None:
    """Return the cause if ranks load other files than one rank, or only some of them load one."""
    if all(rank.loaded.keys() == one.loaded.keys() for rank in many):
        return None
    held = {"one rank": one.loaded, **{f"rank {rank.facts.rank}": rank.loaded for rank in many}}
    return Cause(
        "other checkpoint",
        "ranks load other states before the first step than one rank does",
        "load one file on every rank, whose name does not depend on the rank or the number of ranks; or load it on "
        "rank 0 before rankwise.replicate(model), which broadcasts parameters",
        evidence=tuple(f"{rank}: {', '.join(files) or 'none'}" for rank, files in held.items()),
        line=next((line for files in held.values() for line in files.values()), ""),
    )


def chosen(rank: RankRun) -> Cause | None:
    """Return the call of rankwise's by which the script gives up equality with one rank."""
    for call, line in rank.facts.inexact.items():
        return Cause(
            "by choice",
            f"{call} gives up equality with one rank, to wait or to send less",
            "none is needed if that is intended; to look for other differences, verify the script without it, with "
            "rankwise.replicate(model)",
            line=line,
        )
    return None


# -- what a script keeps -------------------------------------------------------------------------------------


def kept(evidence: Evidence) -> Cause | None:
    """Return the value that ranks keep from step to step otherwise than one rank does, tensors before numbers."""
    for name, mine in sorted(evidence.one.kept.items(), key=lambda item: not item[1].shape):
        held = [step.kept.get(name) for step in evidence.theirs if step.kept]
        if all(is_near(mine, other) for other in held) or _are_parts(mine, held):
            continue
        return Cause(
            "kept value",
            f"{name} is kept from step to step, and the loss follows from it; each rank changes it by its own samples",
            "change it by the samples of all ranks: "
            + (
                "from rankwise.whole_batch(x), of indices too, or from rankwise.mean(value, len(x)) if it is a number"
                if evidence.uses_rankwise
                else "all_gather rows and indices, or all_reduce the sum and the count, before it is changed"
            ),
            line=evidence.reference.lines_of_kept.get(name, ""),
        )
    return None


def _are_parts(mine: Sketch, held: Sequence[Sketch | None]) -> bool:
    """Return whether ranks hold the rows of one rank's tensor, as of a state that is carried from batch to batch."""
    shapes = [one.shape for one in held if one is not None]
    if not mine.shape or len(shapes) < len(held) or any(shape[1:] != mine.shape[1:] for shape in shapes):
        return False
    return sum(shape[0] for shape in shapes) == mine.shape[0]
