# SPDX-License-Identifier: Apache-2.0
"""From the first difference to its cause, in words, with the fix: one function per phase, signature by signature.

Values only; imports no torch. The first signature that fits the evidence counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.errors import fold_ranks
from rankwise.verify.compare import COPY, PLATEAU, Cause, combined, is_close, is_near, is_same, ratio_of, samples
from rankwise.verify.mistakes import loaded_apart

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rankwise.verify.compare import Evidence, Phase
    from rankwise.verify.records import Step


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
_STATISTICS = ("running_mean", "running_var")
_SYNC = (
    "rankwise.replicate(model, sync_batchnorm=True), or torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before "
    "DistributedDataParallel"
)
_DECIDE = (
    "decide from a value that is equal on all ranks: scheduler.step(rankwise.mean(loss, num_samples)), or all_reduce "
    "it first"
)


def explain(evidence: Evidence) -> Cause:
    """Return the cause of the first difference."""
    return _OF_PHASE[evidence.gap.phase](evidence)


# -- data, parameters and forward ----------------------------------------------------------------------------


def _of_data(evidence: Evidence) -> Cause:
    line = _line_of_call(evidence)
    # A batch may be of an earlier step, of another optimizer.
    mine = samples(evidence.reference.steps[: evidence.gap.step])
    theirs = samples(step for rank in evidence.many for step in rank.steps[: evidence.gap.step])
    if evidence.gap.kind != "batch" and mine and mine == theirs:
        return Cause(
            "noise in the loop",
            "the loaders give the same samples, but the script changes them before the model with random numbers that "
            "each rank draws for itself",
            "draw them in `with rankwise.as_one_rank():`, or in the dataset, by sample"
            if evidence.uses_rankwise
            else "draw the numbers for the whole batch on every rank from one seed and take this rank's rows",
            line=line,
        )
    rows = sum(step.rows for step in evidence.theirs)
    if evidence.one.rows != rows:
        return Cause(
            "batch size",
            f"{evidence.num_ranks} ranks take {rows} samples together in this step, and one rank takes "
            f"{evidence.one.rows}",
            "pass global_batch_size to rankwise.DataLoader, or divide the batch size by the number of ranks",
        )
    return Cause(
        "other samples",
        "the ranks together train on other samples in this step than one rank does",
        "give each rank its part of one global order: rankwise.DataLoader(global_batch_size=...), or a "
        "DistributedSampler with the same seed on all ranks",
        line=line,
    )


def _of_start(evidence: Evidence) -> Cause:
    loaded = loaded_apart(evidence.reference, evidence.many)
    if loaded is not None:
        return loaded
    starts = [parameter.before for parameter in evidence.on_ranks(evidence.gap.name)]
    if all(is_same(starts[0], start) for start in starts):
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
        evidence=tuple(f"rank {rank}: norm {start.norm:.9g}" for rank, start in enumerate(starts)),
    )


def _of_forward(evidence: Evidence) -> Cause:
    gap, line = evidence.gap, _line_of_call(evidence)
    if "BatchNorm" in gap.kind:
        whose, fix = "each rank normalizes by the statistics of its own samples", _SYNC
        if evidence.is_staged:
            whose = "it normalizes by the statistics of each micro-batch"
            fix = "micro_batches=1 (with dp_replicate=1), or GroupNorm"
        return Cause("batchnorm", f"{gap.name} is a {gap.kind}: {whose}", fix)
    if "Dropout" in gap.kind or any(call.drew for step in evidence.theirs for call in step.calls):
        return Cause(
            "dropout masks",
            "the model draws random numbers (dropout, noise), and each rank draws its own, not those of one rank for "
            "its samples",
            _draw_by_sample(evidence),
            line=line,
        )
    return Cause(
        "coupled samples",
        f"{gap.name} ({gap.kind}) gives samples another output when they are computed on {evidence.num_ranks} ranks: "
        "its result depends on the other samples of the batch, or on the rank",
        "compute what it needs of other samples over all ranks, with rankwise.all_gather_uneven or rankwise.all_reduce",
        line=line,
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


# -- gradients -----------------------------------------------------------------------------------------------


def _of_gradient(evidence: Evidence) -> Cause:
    norms = [step.clipped for step in evidence.theirs]
    is_unequal = all(norms) and not all(is_close(one[0], norms[0][0]) for one in norms)
    staged = _of_stages(evidence)
    if staged is None and is_unequal:
        return Cause(
            "local clipping",
            "clip_grad_norm_ ran on each rank's own gradients, before they were exchanged",
            "clip after the gradients of all ranks are averaged",
            evidence=tuple(f"rank {rank}: norm {one[0]:.6g}" for rank, one in enumerate(norms)),
        )
    return (
        staged
        or _mean_of_means(evidence)
        or _scaled(evidence)
        or _not_exchanged(evidence)
        or _unused(evidence)
        or _hooked(evidence)
        or _wrong_exchange(evidence)
    )


def _of_stages(evidence: Evidence) -> Cause | None:
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


def _mean_of_means(evidence: Evidence) -> Cause | None:
    """Ranks hold unequal shares and their gradients count equally; weighted by the shares they are one rank's."""
    rows, size = [step.rows for step in evidence.theirs], evidence.num_ranks
    factor = next((one for one in (1.0, 1 / size) if evidence.adds_up(one)), None)
    if len(set(rows)) == 1 or factor is None:
        return None
    weights = [factor * size * count / sum(rows) for count in rows]
    wanted = {one.name: one.gradient for one in evidence.one.parameters}
    for held in evidence.with_locals():
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


def _scaled(evidence: Evidence) -> Cause | None:
    """All gradients are those of one rank, times one number."""
    size, line = evidence.num_ranks, evidence.one.loss_line
    ratios = [ratio_of(mine, values[0]) for mine, values in evidence.gradients()]
    if not ratios or None in ratios or not all(is_close(one or 0.0, ratios[0] or 0.0) for one in ratios):
        return None
    if not evidence.ranks_agree:
        return None
    ratio = ratios[0] or 0.0
    mine, theirs = evidence.one.clipped, evidence.theirs[0].clipped
    if mine and theirs and mine[0] > 0.0 and theirs[0]:
        # The norms before they were clipped.
        ratio = theirs[0] / mine[0]
    if is_close(ratio, size):
        return Cause(
            "summed",
            f"every gradient is {size} times that of one rank: gradients of {size} ranks are summed, not averaged",
            f"divide by the number of ranks once: all_reduce with an average, or loss / {size} where gradients are "
            "summed; leave out factors of world_size in the loss",
            line=line,
        )
    if is_close(ratio * size, 1.0):
        return Cause(
            "divided twice",
            f"every gradient is 1/{size} of that of one rank: it is divided by the number of ranks twice, or "
            "the loss is a sum over samples and ranks average it",
            "rankwise.replicate and DistributedDataParallel average already: leave out the division; with a summed "
            "loss multiply by the number of ranks, or use a mean",
            line=line,
        )
    return Cause(
        "scaled",
        f"every gradient is {ratio:.6g} times that of one rank",
        "look for a factor in the loss that depends on the number of ranks or samples: a mean over other samples, an "
        "accumulation counted per rank",
        line=line,
    )


def _not_exchanged(evidence: Evidence) -> Cause | None:
    """Each rank steps with the gradient of its own samples."""
    every = list(evidence.with_locals())
    alone = [
        held[0].name
        for held in every
        if all(is_near(one.local, one.gradient) for one in held)
        and not all(is_near(held[0].gradient, one.gradient) for one in held)
    ]
    if evidence.gap.name not in alone:
        return None
    if len(alone) == len(every):
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
    held = [one.gradient for one in evidence.on_ranks(evidence.gap.name)]
    without = [rank for rank, one in enumerate(held) if one is None or one.squares == 0.0]
    if mine is None or mine.squares == 0.0 or not without:
        return None
    return Cause(
        "unused",
        f"{evidence.gap.name} has no gradient on {fold_ranks(without)}, which did not use it",
        "use the parameter on every rank"
        + ("" if evidence.replicates else ", or rankwise.replicate(model), which handles unused parameters"),
    )


def _hooked(evidence: Evidence) -> Cause | None:
    line = evidence.many[0].hook_line
    if not line or not evidence.ranks_agree:
        return None
    return Cause(
        "hook",
        "a hook changes the gradients of what the model computes: on each rank it sees those of the mean over that "
        "rank's samples",
        "keep the change linear, as scaling and masking are, or change the gradients of parameters after backward()"
        + (", or in parameter.register_hook, which gets the mean over all ranks" if evidence.replicates else ""),
        line=line,
    )


def _wrong_exchange(evidence: Evidence) -> Cause:
    if evidence.ranks_agree and (evidence.adds_up(1.0) or evidence.adds_up(1 / evidence.num_ranks)):
        # The exchange is a plain mean or sum, and still not one rank's: the losses count something else.
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
    return Cause(
        "wrong exchange",
        "the ranks step with equal gradients, which are not the mean of those of their samples"
        if evidence.ranks_agree
        else f"{fold_ranks(evidence.gap.ranks)} steps with another gradient than one rank",
        "look at what happens to gradients between backward and step: clipping, scaling, noise, a decision per rank",
        line=evidence.one.step_line,
    )


# -- optimizer and buffers -----------------------------------------------------------------------------------


def _of_decisions(evidence: Evidence) -> Cause:
    ends = [one.last for one in evidence.many if one.last is not None]
    given = [one.metrics for one in (ends if evidence.gap.phase == "end" else evidence.theirs)]
    return Cause(
        "local decision",
        f"{PLATEAU} is given another value on each rank, such as the loss of a rank's own samples: it will change the "
        "learning rate on some ranks before it does on others",
        _DECIDE,
        evidence=tuple(
            f"rank {rank}: {', '.join(f'{one:.9g}' for one in values)}" for rank, values in enumerate(given)
        ),
        line=evidence.many[0].scheduler_line,
    )


def _of_hyperparameters(evidence: Evidence) -> Cause:
    name, line = evidence.gap.name, evidence.one.step_line
    mine, *held = (_hyperparameter(step, name) for step in (evidence.one, *evidence.theirs))
    if len(set(held)) > 1:
        return Cause(
            "local decision",
            f"{name} is not the same on all ranks: a scheduler or a condition uses a rank's own value",
            _DECIDE,
            evidence=tuple(f"rank {rank}: {value}" for rank, value in enumerate(held)),
            line=line,
        )
    steps, others = evidence.one.num_scheduler_steps, evidence.theirs[0].num_scheduler_steps
    if steps != others and name != "initial_lr":
        return Cause(
            "scheduler",
            f"the scheduler has taken {others} steps on each rank, and {steps} on one rank",
            "step it once per optimizer step, whatever the number of ranks",
            line=line,
        )
    if not mine or held[0] is None:
        return Cause("unknown", "no known cause fits this difference", "compare the code that computes it on each rank")
    ratio = held[0] / mine
    by = f"{ratio:g} times" if ratio >= 1 else f"1/{1 / ratio:g} of"
    return Cause(
        "scaled setting",
        f"{name} is {held[0]:g} on {evidence.num_ranks} ranks, {by} the {mine:g} of one rank, with the same global "
        "batch",
        f"leave {name} as it is: the global batch does not grow with the number of ranks",
        line=line,
    )


def _hyperparameter(step: Step, name: str) -> float | None:
    return next((group[name] for group in step.hyperparameters if name in group), None)


def _of_state(evidence: Evidence) -> Cause:
    loaded = loaded_apart(evidence.reference, evidence.many) if evidence.gap.step == 1 else None
    return loaded or Cause(
        "optimizer state",
        f"gradients agree so far, but the optimizer holds another {evidence.gap.name} before the step: its state was "
        "loaded, reset or changed on some ranks only",
        "load or change the state of the optimizer on every rank",
        line=evidence.one.step_line,
    )


def _of_update(_: Evidence) -> Cause:
    return Cause(
        "update",
        "gradients, hyperparameters and the state of the optimizer agree, but the parameter changes differently: the "
        "script changes it itself",
        "change parameters by values that are equal on all ranks",
    )


def _of_copies(evidence: Evidence) -> Cause:
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


def _of_buffers(evidence: Evidence) -> Cause:
    name = evidence.gap.name
    if evidence.gap.kind == COPY:
        return _of_copies(evidence)
    if name.endswith(_STATISTICS):
        return Cause("batchnorm", f"{name} holds the statistics of one rank's samples, not of all ranks'", _SYNC)
    return Cause(
        "buffers",
        f"{name} is updated from one rank's samples",
        "compute it from all samples, with rankwise.all_reduce of sums and counts",
    )


_OF_PHASE: Mapping[Phase, Callable[[Evidence], Cause]] = {
    "decisions": _of_decisions,
    "data": _of_data,
    "initial parameters": _of_start,
    "forward": _of_forward,
    "gradient": _of_gradient,
    "hyperparameters": _of_hyperparameters,
    "optimizer state": _of_state,
    "update": _of_update,
    "buffers": _of_buffers,
    "end": lambda evidence: (_of_decisions if evidence.gap.kind == PLATEAU else _of_buffers)(evidence),
}


def _line_of_call(evidence: Evidence) -> str:
    return next((call.line for call in evidence.one.calls), "")
