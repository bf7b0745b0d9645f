# SPDX-License-Identifier: Apache-2.0
"""From the first difference to its cause, in words, with the fix: one function per signature.

Values only; imports no torch. Each function looks at the evidence and returns a cause or ``None``; the first counts.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankwise.errors import fold_ranks
from rankwise.tools.verify.records import summed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from rankwise.tools.verify.compare import Gap
    from rankwise.tools.verify.records import Batch, Loader, Parameter, RankRun, Sketch, Step

CLOSE = 1e-4
"""Relative difference up to which a signature fits; the differences that are explained are much larger."""
LEAST_SAMPLES = 8
"""How many samples in the same order are no coincidence."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Why ranks differ, and what to change."""

    key: str
    """A name for programs: ``"summed"``."""
    words: str
    fix: str
    evidence: tuple[str, ...] = ()
    line: str = ""


@dataclass(frozen=True, slots=True)
class Evidence:
    """The first difference, and the records around it."""

    gap: Gap
    reference: RankRun
    many: tuple[RankRun, ...]
    is_joined: bool
    """Whether the reference took the ranks' batches together."""

    @property
    def num_ranks(self) -> int:
        """How many ranks were compared with one."""
        return len(self.many)

    @property
    def one(self) -> Step:
        """The step of the reference."""
        return self.reference.steps[self.gap.step - 1]

    @property
    def theirs(self) -> list[Step]:
        """The step of each rank."""
        return [rank.steps[self.gap.step - 1] for rank in self.many]

    @property
    def uses_rankwise(self) -> bool:
        """Whether the script called ``rankwise.join()``."""
        return self.many[0].facts.uses_rankwise


def explain(evidence: Evidence) -> Cause:
    """Return the cause of the first difference."""
    for signature in _SIGNATURES[evidence.gap.phase]:
        cause = signature(evidence)
        if cause is not None:
            return cause
    return Cause("unknown", "no known cause fits this difference", "compare the code that computes it on each rank")


# -- data ----------------------------------------------------------------------------------------------------


def _drawn_in_the_loop(evidence: Evidence) -> Cause | None:
    """The loader's samples agree, but not those that reach the model."""
    mine = Counter(digest for batch in evidence.one.batches for digest in batch.digests)
    total = Counter(digest for step in evidence.theirs for batch in step.batches for digest in batch.digests)
    if evidence.gap.kind == "batch" or not mine or mine != total:
        return None
    return Cause(
        "noise in the loop",
        "the loaders give the same samples, but the script changes them before the model with random numbers that "
        "each rank draws for itself",
        "draw them in `with rankwise.as_one_rank():`, or in the dataset, by sample"
        if evidence.uses_rankwise
        else "draw the numbers for the whole batch on every rank from one seed and take this rank's rows",
        line=_line_of_call(evidence),
    )


def _other_number_of_samples(evidence: Evidence) -> Cause | None:
    mine, total = evidence.one.rows, sum(step.rows for step in evidence.theirs)
    if mine == total:
        return None
    return Cause(
        "batch size",
        f"{evidence.num_ranks} ranks take {total} samples together in this step, and one rank takes {mine}",
        "pass global_batch_size to rankwise.DataLoader, or divide the batch size by the number of ranks",
    )


def _other_samples(evidence: Evidence) -> Cause | None:
    return Cause(
        "other samples",
        "the ranks together train on other samples in this step than one rank does",
        "give each rank its part of one global order: rankwise.DataLoader(global_batch_size=...), or a "
        "DistributedSampler with the same seed on all ranks",
        line=_line_of_call(evidence),
    )


# -- parameters ----------------------------------------------------------------------------------------------


def _different_start(evidence: Evidence) -> Cause | None:
    values = {rank: _before(step, evidence.gap.name) for rank, step in enumerate(evidence.theirs)}
    first = values[0]
    if all(_is_same(first, value) for value in values.values()):
        return Cause(
            "seeded by rank",
            "the ranks start from equal parameters, which are not those of one rank",
            "call torch.manual_seed with a number that does not depend on the rank or the number of ranks, before "
            "the model is built",
        )
    return Cause(
        "different start",
        "the ranks start from different parameters",
        "build the model after torch.manual_seed with the same seed on all ranks, or broadcast rank 0's: "
        "rankwise.replicate(model) and DistributedDataParallel(model) do so",
        evidence=tuple(f"rank {rank}: norm {value.norm:.9g}" for rank, value in values.items() if value is not None),
    )


def _before(step: Step, name: str) -> Sketch | None:
    return next((parameter.before for parameter in step.parameters if parameter.name == name), None)


# -- forward -------------------------------------------------------------------------------------------------


def _batch_norm(evidence: Evidence) -> Cause | None:
    if "BatchNorm" not in evidence.gap.kind:
        return None
    return Cause(
        "batchnorm",
        f"{evidence.gap.name} is a {evidence.gap.kind}: each rank normalizes by the statistics of its own samples",
        _SYNC,
    )


_SYNC = (
    "rankwise.replicate(model, sync_batchnorm=True), or torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before "
    "DistributedDataParallel"
)


def _random_in_forward(evidence: Evidence) -> Cause | None:
    draws = any(call.drew for step in evidence.theirs for call in step.calls)
    if not draws and "Dropout" not in evidence.gap.kind:
        return None
    return Cause(
        "dropout masks",
        "the model draws random numbers (dropout, noise), and each rank draws its own, not those of one rank for its "
        "samples",
        "leave out randomness= of rankwise.replicate(model), which draws by the position of each sample by default"
        if evidence.uses_rankwise
        else "rankwise.replicate(model), which draws by the position of each sample",
        line=_line_of_call(evidence),
    )


def _coupled(evidence: Evidence) -> Cause | None:
    return Cause(
        "coupled samples",
        f"{evidence.gap.name} ({evidence.gap.kind}) gives samples another output when they are computed on "
        f"{evidence.num_ranks} ranks: its result depends on the other samples of the batch, or on the rank",
        "compute what it needs of other samples over all ranks, with rankwise.all_gather_uneven or rankwise.all_reduce",
        line=_line_of_call(evidence),
    )


# -- gradients -----------------------------------------------------------------------------------------------


def _clipped_locally(evidence: Evidence) -> Cause | None:
    norms = [step.clipped for step in evidence.theirs]
    if not all(norms) or all(_is_close(one[0], norms[0][0]) for one in norms):
        return None
    return Cause(
        "local clipping",
        "clip_grad_norm_ ran on each rank's own gradients, before they were exchanged",
        "clip after the gradients of all ranks are averaged",
        evidence=tuple(f"rank {rank}: norm {one[0]:.6g}" for rank, one in enumerate(norms)),
    )


def _scaled(evidence: Evidence) -> Cause | None:
    """All gradients are those of one rank, times one number."""
    size = evidence.num_ranks
    ratios = [ratio for mine, values in _pairs(evidence) for ratio in (_ratio_of(mine, values[0]),) if mine]
    known = [ratio for ratio in ratios if ratio is not None]
    if not known or len(known) < len(ratios):
        return None
    if not all(_is_close(one, known[0]) for one in known) or not _ranks_agree(evidence):
        return None
    ratio = _ratio_before_clipping(evidence) or known[0]
    if _is_close(ratio, size):
        return Cause(
            "summed",
            f"every gradient is {size} times that of one rank: gradients of {size} ranks are summed, not averaged",
            f"divide by the number of ranks once: all_reduce with an average, or loss / {size} where gradients are "
            "summed; leave out factors of world_size in the loss",
            line=evidence.one.loss_line,
        )
    if _is_close(ratio * size, 1.0):
        return Cause(
            "divided twice",
            f"every gradient is 1/{size} of that of one rank: it is divided by the number of ranks once too often, or "
            "the loss is a sum over samples and ranks average it",
            "rankwise.replicate and DistributedDataParallel average already: leave out the division; with a summed "
            "loss multiply by the number of ranks, or use a mean",
            line=evidence.one.loss_line,
        )
    return Cause(
        "scaled",
        f"every gradient is {ratio:.6g} times that of one rank",
        "look for a factor in the loss that depends on the number of ranks or samples: a mean over other samples, an "
        "accumulation counted per rank",
        line=evidence.one.loss_line,
    )


def _ratio_before_clipping(evidence: Evidence) -> float | None:
    """Return how many times larger the norm was before it was clipped; ``None`` if nothing was."""
    mine, theirs = evidence.one.clipped, evidence.theirs[0].clipped
    return theirs[0] / mine[0] if mine and theirs and mine[0] > 0.0 else None


def _mean_of_means(evidence: Evidence) -> Cause | None:
    """Ranks hold unequal shares and their gradients count equally; weighted by the shares they are one rank's."""
    rows = [step.rows for step in evidence.theirs]
    total = sum(rows)
    if len(set(rows)) == 1 or not any(_is_plain(evidence, factor) for factor in (1.0, 1 / len(rows))):
        return None
    factor = 1.0 if _is_plain(evidence, 1.0) else 1 / len(rows)
    weights = [factor * len(rows) * count / total for count in rows]
    wanted = {one.name: one.gradient for one in evidence.one.parameters}
    for held in _locals(evidence):
        if not _is_near(_combined([one.local for one in held], weights), wanted[held[0].name]):
            return None
    return Cause(
        "mean of means",
        f"ranks hold {', '.join(map(str, rows))} samples in this step, and their means count equally",
        "weight each rank's mean by its number of samples: rankwise.replicate does so; or multiply the loss by "
        "len(batch) * world_size / global batch size",
        line=evidence.one.loss_line,
    )


def _is_plain(evidence: Evidence, factor: float) -> bool:
    """Return whether the gradient is the sum of the ranks' own ones, times a factor."""
    every = list(_locals(evidence))
    return bool(every) and all(
        _is_near(_combined([one.local for one in held], [factor] * len(held)), held[0].gradient) for held in every
    )


def _unequal_counts(evidence: Evidence) -> Cause | None:
    """The exchange is a plain mean or sum, and still not one rank's: the losses count something else."""
    if not _ranks_agree(evidence) or not any(_is_plain(evidence, one) for one in (1.0, 1 / evidence.num_ranks)):
        return None
    return Cause(
        "mean of means",
        "the gradients of ranks count equally, but their losses are means over unequal counts (tokens, masked "
        "elements, class weights) or couple samples",
        "use rankwise.replicate, which reads the count from the loss, or divide each rank's sum by the count of all "
        "ranks: rankwise.all_reduce(count)",
        line=evidence.one.loss_line,
    )


def _not_exchanged(evidence: Evidence) -> Cause | None:
    """Each rank steps with the gradient of its own samples."""
    alone = [
        parameters[0].name
        for parameters in _locals(evidence)
        if all(_is_near(one.local, one.gradient) for one in parameters) and not _agree(parameters)
    ]
    if evidence.gap.name not in alone:
        return None
    every = len(alone) == len(list(_locals(evidence)))
    if every:
        return Cause(
            "not exchanged",
            "each rank steps with the gradients of its own samples alone: nothing exchanges them",
            "model = rankwise.replicate(model), or DistributedDataParallel(model), before the optimizer is built; "
            "end an accumulation outside no_sync(); exchange before optimizer.step()",
            line=evidence.one.step_line,
        )
    shown = ", ".join(alone[:3]) + (", ..." if alone[3:] else "")
    return Cause(
        "bypassed",
        f"the gradients of {shown} are not exchanged: each rank steps them with those of its own samples",
        "hand the module that holds them to rankwise.replicate, or make it a submodule of the model before that; call "
        "the wrapper, not its .module",
        line=evidence.one.step_line,
    )


def _unused(evidence: Evidence) -> Cause | None:
    mine = next(one for one in evidence.one.parameters if one.name == evidence.gap.name).gradient
    held = [one.gradient for step in evidence.theirs for one in step.parameters if one.name == evidence.gap.name]
    without = [rank for rank, one in enumerate(held) if one is None or one.squares == 0.0]
    if mine is None or mine.squares == 0.0 or not without:
        return None
    return Cause(
        "unused",
        f"{evidence.gap.name} has no gradient on {fold_ranks(without)}, which did not use it",
        "use the parameter on every rank, or rankwise.replicate(model), which handles unused parameters",
    )


def _wrong_exchange(evidence: Evidence) -> Cause | None:
    if _ranks_agree(evidence):
        words = "the ranks step with equal gradients, which are not the mean of those of their samples"
    else:
        words = f"{fold_ranks(evidence.gap.ranks)} steps with another gradient than one rank"
    return Cause(
        "wrong exchange",
        words,
        "look at what happens to gradients between backward and step: clipping, scaling, noise, a decision per rank",
        line=evidence.one.step_line,
    )


# -- optimizer -----------------------------------------------------------------------------------------------


def _decided_locally(evidence: Evidence) -> Cause | None:
    held = [_hyperparameter(step, evidence.gap.name) for step in evidence.theirs]
    if len(set(held)) == 1:
        return None
    return Cause(
        "local decision",
        f"{evidence.gap.name} is not the same on all ranks: a scheduler or a condition uses a rank's own value",
        "decide from a value that is equal on all ranks: scheduler.step(rankwise.mean(loss, num_samples)), or "
        "all_reduce it first",
        evidence=tuple(f"rank {rank}: {value}" for rank, value in enumerate(held)),
        line=evidence.one.step_line,
    )


def _scheduler_too_fast(evidence: Evidence) -> Cause | None:
    mine, theirs = evidence.one.num_scheduler_steps, evidence.theirs[0].num_scheduler_steps
    if mine == theirs or evidence.gap.name == "initial_lr":
        return None
    return Cause(
        "scheduler",
        f"the scheduler has taken {theirs} steps on each rank, and {mine} on one rank",
        "step it once per optimizer step, whatever the number of ranks",
        line=evidence.one.step_line,
    )


def _scaled_setting(evidence: Evidence) -> Cause | None:
    mine = _hyperparameter(evidence.one, evidence.gap.name)
    theirs = _hyperparameter(evidence.theirs[0], evidence.gap.name)
    if not mine or theirs is None:
        return None
    ratio = theirs / mine
    by = f"{ratio:g} times" if ratio >= 1 else f"1/{1 / ratio:g} of"
    return Cause(
        "scaled setting",
        f"{evidence.gap.name} is {theirs:g} on {evidence.num_ranks} ranks, {by} the {mine:g} of one rank, with the "
        "same global batch",
        f"leave {evidence.gap.name} as it is: the global batch does not grow with the number of ranks",
        line=evidence.one.step_line,
    )


def _hyperparameter(step: Step, name: str) -> float | None:
    return next((group[name] for group in step.hyperparameters if name in group), None)


def _other_update(_: Evidence) -> Cause | None:
    return Cause(
        "update",
        "gradients and hyperparameters agree, but the optimizer changes the parameter differently: its state differs, "
        "or the script changes parameters itself",
        "load the optimizer's state on every rank, and change parameters by values that are equal on all ranks",
    )


def _other_buffer(evidence: Evidence) -> Cause | None:
    is_norm = evidence.gap.name.endswith(("running_mean", "running_var"))
    if is_norm:
        return Cause(
            "batchnorm", f"{evidence.gap.name} holds the statistics of one rank's samples, not of all ranks'", _SYNC
        )
    return Cause(
        "buffers",
        f"{evidence.gap.name} is updated from one rank's samples",
        "compute it from all samples, with rankwise.all_reduce of sums and counts",
    )


_SIGNATURES: Mapping[str, Sequence[Callable[[Evidence], Cause | None]]] = {
    "data": (_drawn_in_the_loop, _other_number_of_samples, _other_samples),
    "initial parameters": (_different_start,),
    "forward": (_batch_norm, _random_in_forward, _coupled),
    "gradient": (
        _clipped_locally,
        _mean_of_means,
        _scaled,
        _not_exchanged,
        _unused,
        _unequal_counts,
        _wrong_exchange,
    ),
    "hyperparameters": (_decided_locally, _scheduler_too_fast, _scaled_setting),
    "update": (_other_update,),
    "buffers": (_other_buffer,),
}


# -- what is wrong without a number --------------------------------------------------------------------------


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
    for held in steps:
        first = Counter(held[0].inputs)
        if any(Counter(step.inputs) != first for step in held):
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


def _unsharded(one: RankRun, many: Sequence[RankRun]) -> Finding | None:
    """Each rank goes through the whole dataset, in an order of its own."""
    if not one.steps or any(not rank.steps for rank in many):
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
        for step in held:
            for batch in _trained(step):
                counts = seen.setdefault((batch.loader, batch.epoch), Counter())
                counts.update(batch.digests)
        twice = sum(count - 1 for counts in seen.values() for count in counts.values())
        # Batches that each rank cuts by itself are the same on all ranks.
        if twice and not all(_digests(step) == _digests(held[0]) for step in held):
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


# -- numbers around a difference -----------------------------------------------------------------------------


def _line_of_call(evidence: Evidence) -> str:
    return next((call.line for call in evidence.one.calls), "")


def _loader(rank: RankRun, step: Step) -> Loader | None:
    number = next((batch.loader for batch in step.batches), None)
    return next((loader for loader in rank.loaders if loader.number == number), None)


def _line_of_loader(rank: RankRun, step: Step) -> str:
    loader = _loader(rank, step)
    return "" if loader is None else loader.line


def _pairs(evidence: Evidence) -> Iterator[tuple[Sketch | None, list[Sketch | None]]]:
    """Yield each parameter's gradient on one rank and on all ranks, those large enough to compare."""
    whole = max((one.gradient.norm for one in evidence.one.parameters if one.gradient is not None), default=0.0)
    for parameter in evidence.one.parameters:
        if parameter.gradient is not None and parameter.gradient.norm > CLOSE * whole:
            yield (
                parameter.gradient,
                [one.gradient for step in evidence.theirs for one in step.parameters if one.name == parameter.name],
            )


def _locals(evidence: Evidence) -> Iterator[list[Parameter]]:
    """Yield each parameter as all ranks hold it, if each has a gradient of its own samples."""
    for parameter in evidence.one.parameters:
        held = [one for step in evidence.theirs for one in step.parameters if one.name == parameter.name]
        if all(one.local is not None and one.gradient is not None for one in held) and len(held) > 1:
            yield held


def _ranks_agree(evidence: Evidence) -> bool:
    return all(_is_near(values[0], value) for _, values in _pairs(evidence) for value in values)


def _agree(parameters: Sequence[Parameter]) -> bool:
    return all(_is_near(parameters[0].gradient, one.gradient) for one in parameters)


def _combined(values: Sequence[Sketch | None], weights: Sequence[float]) -> Sketch | None:
    """Return the weighted sum of sketches; its squares are those of the sum, as the projections tell."""
    if any(value is None for value in values):
        return None
    columns = zip(*(value.projections for value in values if value is not None), strict=True)
    projections = tuple(sum(w * v for w, v in zip(weights, column, strict=True)) for column in columns)
    total = summed(values)
    if total is None:
        return None
    squares = sum(value * value for value in projections) / len(projections)
    return type(total)(total.shape, 1, squares, projections)


def _ratio_of(mine: Sketch | None, other: Sketch | None) -> float | None:
    """Return what ``mine`` is multiplied by to be ``other``; ``None`` if it is no multiple."""
    if mine is None or other is None or mine.shape != other.shape:
        return None
    dot = sum(one * two for one, two in zip(mine.projections, other.projections, strict=True))
    own = sum(one * one for one in mine.projections)
    if own == 0.0:
        return None
    ratio = dot / own
    rest = sum((two - ratio * one) ** 2 for one, two in zip(mine.projections, other.projections, strict=True))
    return ratio if rest**0.5 <= CLOSE * abs(ratio) * own**0.5 else None


def _is_near(one: Sketch | None, other: Sketch | None) -> bool:
    if one is None or other is None:
        return one is other
    if one.shape != other.shape:
        return False
    apart = sum(value * value for value in one.minus(other)) ** 0.5
    size = sum(value * value for value in one.projections) ** 0.5
    return apart <= CLOSE * size


def _is_same(one: Sketch | None, other: Sketch | None) -> bool:
    return one is not None and other is not None and one.projections == other.projections


def _is_close(one: float, other: float) -> bool:
    return abs(one - other) <= CLOSE * max(abs(one), abs(other))
