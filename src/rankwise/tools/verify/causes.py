# SPDX-License-Identifier: Apache-2.0
"""From the first difference to its cause, in words, with the fix: one function per signature.

Values only; imports no torch. Each function looks at the evidence and returns a cause or ``None``; the first counts.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from rankwise.errors import fold_ranks
from rankwise.tools.verify.compare import COPY, PLATEAU
from rankwise.tools.verify.evidence import (
    Cause,
    agree,
    combined,
    is_close,
    is_near,
    is_same,
    locals_of,
    pairs,
    ranks_agree,
    ratio_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rankwise.tools.verify.evidence import Evidence
    from rankwise.tools.verify.records import RankRun, Sketch, Step


GENERAL = (
    "unknown",
    "noise in the loop",
    "dropout masks",
    "batchnorm",
    "coupled samples",
    "mean of means",
    "scaled",
    "not exchanged",
    "bypassed",
    "wrong exchange",
    "hook",
    "optimizer state",
    "update",
    "buffers",
)
"""Causes that are told from numbers alone: what rankwise said of the run is more exact."""


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
    # A batch may be of an earlier step, of another optimizer.
    mine = _loaded_until(evidence.gap.step, [evidence.reference])
    total = _loaded_until(evidence.gap.step, evidence.many)
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


def _loaded_until(step: int, ranks: Sequence[RankRun]) -> Counter[int]:
    batches = (batch for rank in ranks for one in rank.steps[:step] for batch in one.batches)
    return Counter(digest for batch in batches for digest in batch.digests)


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


def _loaded(evidence: Evidence) -> Cause | None:
    return loaded_apart(evidence.reference, evidence.many) if evidence.gap.step == 1 else None


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
        evidence=tuple(f"{who}: {', '.join(files) or 'none'}" for who, files in held.items()),
        line=next((line for files in held.values() for line in files.values()), ""),
    )


def _different_start(evidence: Evidence) -> Cause | None:
    values = {rank: _before(step, evidence.gap.name) for rank, step in enumerate(evidence.theirs)}
    first = values[0]
    if all(is_same(first, value) for value in values.values()):
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
    if evidence.is_staged:
        return Cause(
            "batchnorm",
            f"{evidence.gap.name} is a {evidence.gap.kind}: it normalizes by the statistics of each micro-batch",
            "micro_batches=1 (with dp_replicate=1), or GroupNorm",
        )
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
        _draw_by_sample(evidence),
        line=_line_of_call(evidence),
    )


def _draw_by_sample(evidence: Evidence) -> str:
    if evidence.is_staged:
        return (
            "draw outside blocks under a checkpoint, and outside loss_fn, where a pipeline draws other numbers than "
            "one rank; or nothing, if other numbers will do"
        )
    if set(evidence.many[0].facts.randomness) - {"counter"}:
        return (
            "leave out randomness= of rankwise.replicate(model), which draws by the position of each sample by default"
        )
    if evidence.replicates:
        return (
            "iterate over rankwise.DataLoader, which tells the position of each sample, and draw for tensors whose "
            "samples rankwise can follow; its warning names the line of a draw for others"
        )
    return "rankwise.replicate(model), which draws by the position of each sample"


def _coupled(evidence: Evidence) -> Cause | None:
    return Cause(
        "coupled samples",
        f"{evidence.gap.name} ({evidence.gap.kind}) gives samples another output when they are computed on "
        f"{evidence.num_ranks} ranks: its result depends on the other samples of the batch, or on the rank",
        "compute what it needs of other samples over all ranks, with rankwise.all_gather_uneven or rankwise.all_reduce",
        line=_line_of_call(evidence),
    )


# -- gradients -----------------------------------------------------------------------------------------------


def _of_micro_batches(evidence: Evidence) -> Cause | None:
    """Outputs agree, and the loss of a pipeline or its gradients do not."""
    held = [(step.rows, step.losses[-1]) for step in evidence.theirs if step.rows and step.losses]
    if not evidence.is_staged or not held or not evidence.one.losses:
        return None
    total, mine = sum(loss for _, loss in held), evidence.one.losses[-1]
    mean = sum(rows * loss for rows, loss in held) / sum(rows for rows, _ in held)
    if not is_close(mean, mine) and not is_close(total, mine):
        return Cause(
            "micro-batch loss",
            f"the outputs of the model agree, but loss_fn gives {mine:.6g} for the whole batch and {mean:.6g} for its "
            "micro-batches: it combines samples, or computes a statistic of them",
            "compute statistics of the batch before step(x, y) and pass them in y, one row per sample; or "
            "micro_batches=1 (with dp_replicate=1)",
            line=evidence.one.loss_line,
        )
    return Cause(
        "own stages",
        "the loss agrees, but the gradients that optimizers step with do not: the script changes them, after "
        "step(x, y), by what each rank has of its own stages, such as their norm or numbers that it draws",
        "clip by torch.nn.utils.clip_grad_norm_, which covers all stages; draw for each parameter from a "
        "torch.Generator that is seeded by its name and the step",
        line=evidence.one.step_line,
    )


def _clipped_locally(evidence: Evidence) -> Cause | None:
    norms = [step.clipped for step in evidence.theirs]
    if not all(norms) or all(is_close(one[0], norms[0][0]) for one in norms):
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
    ratios = [ratio for mine, values in pairs(evidence) for ratio in (ratio_of(mine, values[0]),) if mine]
    known = [ratio for ratio in ratios if ratio is not None]
    if not known or len(known) < len(ratios):
        return None
    if not all(is_close(one, known[0]) for one in known) or not ranks_agree(evidence):
        return None
    ratio = _ratio_before_clipping(evidence) or known[0]
    if is_close(ratio, size):
        return Cause(
            "summed",
            f"every gradient is {size} times that of one rank: gradients of {size} ranks are summed, not averaged",
            f"divide by the number of ranks once: all_reduce with an average, or loss / {size} where gradients are "
            "summed; leave out factors of world_size in the loss",
            line=evidence.one.loss_line,
        )
    if is_close(ratio * size, 1.0):
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
    for held in locals_of(evidence):
        if not is_near(combined([one.local for one in held], weights), wanted[held[0].name]):
            return None
    return Cause(
        "mean of means",
        f"ranks hold {', '.join(map(str, rows))} samples in this step, and their means count equally",
        "weight each rank's mean by its number of samples: "
        + ("rankwise.weight(model, len(batch))" if evidence.replicates else "rankwise.replicate does so")
        + "; or multiply the loss by len(batch) * world_size / global batch size",
        line=evidence.one.loss_line,
    )


def _is_plain(evidence: Evidence, factor: float) -> bool:
    """Return whether the gradient is the sum of the ranks' own ones, times a factor."""
    every = list(locals_of(evidence))
    return bool(every) and all(
        is_near(combined([one.local for one in held], [factor] * len(held)), held[0].gradient) for held in every
    )


def _hooked(evidence: Evidence) -> Cause | None:
    line = evidence.many[0].hook_line
    if not line or not ranks_agree(evidence):
        return None
    return Cause(
        "hook",
        "a hook changes the gradients of what the model computes: on each rank it sees those of the mean over that "
        "rank's samples",
        "keep the change linear, as scaling and masking are, or change the gradients of parameters after backward()"
        + (", or in parameter.register_hook, which gets the mean over all ranks" if evidence.replicates else ""),
        line=line,
    )


def _unequal_counts(evidence: Evidence) -> Cause | None:
    """The exchange is a plain mean or sum, and still not one rank's: the losses count something else."""
    if not ranks_agree(evidence) or not any(_is_plain(evidence, one) for one in (1.0, 1 / evidence.num_ranks)):
        return None
    return Cause(
        "mean of means",
        "the gradients of ranks count equally, but their losses are means over unequal counts (tokens, masked "
        "elements, class weights) or couple samples",
        (
            "pass the count to rankwise.weight(model, count)"
            if evidence.replicates
            else "use rankwise.replicate, which reads the count from the loss"
        )
        + ", or divide each rank's sum by the count of all ranks: rankwise.all_reduce(count)",
        line=evidence.one.loss_line,
    )


def _not_exchanged(evidence: Evidence) -> Cause | None:
    """Each rank steps with the gradient of its own samples."""
    alone = [
        parameters[0].name
        for parameters in locals_of(evidence)
        if all(is_near(one.local, one.gradient) for one in parameters) and not agree(parameters)
    ]
    if evidence.gap.name not in alone:
        return None
    every = len(alone) == len(list(locals_of(evidence)))
    if every:
        return Cause(
            "not exchanged",
            "each rank steps with the gradients of its own samples alone: nothing exchanges them",
            (
                "call the model that rankwise.replicate returned, and loss.backward(); average gradients that "
                "torch.autograd.grad returns by rankwise.all_reduce"
                if evidence.replicates
                else "model = rankwise.replicate(model), or DistributedDataParallel(model), before the optimizer is "
                "built"
            )
            + "; end an accumulation outside no_sync(); exchange before optimizer.step()",
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
        "use the parameter on every rank"
        + ("" if evidence.replicates else ", or rankwise.replicate(model), which handles unused parameters"),
    )


def _wrong_exchange(evidence: Evidence) -> Cause | None:
    if ranks_agree(evidence):
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


_DECIDE = (
    "decide from a value that is equal on all ranks: scheduler.step(rankwise.mean(loss, num_samples)), or all_reduce "
    "it first"
)


def _given_locally(evidence: Evidence) -> Cause | None:
    if evidence.gap.kind != PLATEAU:
        return None
    ends = [one.last for one in evidence.many if one.last is not None]
    held = [one.metrics for one in (evidence.theirs if evidence.gap.phase == "decisions" else ends)]
    return Cause(
        "local decision",
        f"{PLATEAU} is given another value on each rank, such as the loss of a rank's own samples: it will change the "
        "learning rate on some ranks before it does on others",
        _DECIDE,
        evidence=tuple(f"rank {rank}: {', '.join(f'{one:.9g}' for one in values)}" for rank, values in enumerate(held)),
        line=evidence.many[0].scheduler_line,
    )


def _decided_locally(evidence: Evidence) -> Cause | None:
    held = [_hyperparameter(step, evidence.gap.name) for step in evidence.theirs]
    if len(set(held)) == 1:
        return None
    return Cause(
        "local decision",
        f"{evidence.gap.name} is not the same on all ranks: a scheduler or a condition uses a rank's own value",
        _DECIDE,
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


def _other_state(evidence: Evidence) -> Cause | None:
    return Cause(
        "optimizer state",
        f"gradients agree so far, but the optimizer holds another {evidence.gap.name} before the step: its state was "
        "loaded, reset or changed on some ranks only",
        "load or change the state of the optimizer on every rank",
        line=evidence.one.step_line,
    )


def _other_update(_: Evidence) -> Cause | None:
    return Cause(
        "update",
        "gradients, hyperparameters and the state of the optimizer agree, but the parameter changes differently: the "
        "script changes it itself",
        "change parameters by values that are equal on all ranks",
    )


def _other_copy(evidence: Evidence) -> Cause | None:
    if evidence.gap.kind != COPY:
        return None
    name, lines = evidence.gap.name, evidence.reference.lines_of_copies
    owner = next((one for one in lines if name.startswith(f"{one}.")), "")
    if not name.endswith(_STATISTICS):
        return Cause(
            "copies",
            f"{name} differs, which belongs to a model that the script only calls without gradients ({owner})",
            "change it by values that are equal on all ranks, such as parameters and buffers of the trained model",
            line=lines.get(owner, ""),
        )
    return Cause(
        "copied statistics",
        f"{name} holds the statistics of each rank's own samples: {owner} is called in training mode without gradients "
        "(update_bn, a teacher), and nothing averages them",
        (
            "copy = rankwise.replicate(copy, sync_batchnorm=True) before it is called, as average = "
            "rankwise.replicate(AveragedModel(model), sync_batchnorm=True)"
            if evidence.uses_rankwise
            else "call it with all samples on every rank: a loader without a DistributedSampler, whose batches are "
            "those of all ranks together"
        )
        + "; or copy.eval(), which keeps them",
        line=lines.get(owner, ""),
    )


_STATISTICS = ("running_mean", "running_var")


def _other_buffer(evidence: Evidence) -> Cause | None:
    is_norm = evidence.gap.name.endswith(_STATISTICS)
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
    "decisions": (_given_locally,),
    "data": (_drawn_in_the_loop, _other_number_of_samples, _other_samples),
    "initial parameters": (_loaded, _different_start),
    "forward": (_batch_norm, _random_in_forward, _coupled),
    "gradient": (
        _of_micro_batches,
        _clipped_locally,
        _mean_of_means,
        _scaled,
        _not_exchanged,
        _unused,
        _hooked,
        _unequal_counts,
        _wrong_exchange,
    ),
    "hyperparameters": (_decided_locally, _scheduler_too_fast, _scaled_setting),
    "optimizer state": (_loaded, _other_state),
    "update": (_other_update,),
    "buffers": (_other_copy, _other_buffer),
    "end": (_given_locally, _other_copy, _other_buffer),
}


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


def chosen(evidence: Evidence) -> Cause | None:
    """Return the call of rankwise's by which the script gives up equality with one rank."""
    for call, line in evidence.many[0].facts.inexact.items():
        return Cause(
            "by choice",
            f"{call} gives up equality with one rank, to wait or to send less",
            "none is needed if that is intended; to look for other differences, verify the script without it, with "
            "rankwise.replicate(model)",
            line=line,
        )
    return None


def _are_parts(mine: Sketch, held: Sequence[Sketch | None]) -> bool:
    """Return whether ranks hold the rows of one rank's tensor, as of a state that is carried from batch to batch."""
    shapes = [one.shape for one in held if one is not None]
    if not mine.shape or len(shapes) < len(held) or any(shape[1:] != mine.shape[1:] for shape in shapes):
        return False
    return sum(shape[0] for shape in shapes) == mine.shape[0]


def _line_of_call(evidence: Evidence) -> str:
    return next((call.line for call in evidence.one.calls), "")
