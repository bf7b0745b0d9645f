# SPDX-License-Identifier: Apache-2.0
"""A model in stages on different ranks, through which a batch goes in micro-batches.

Works in place: the model keeps its class, its modules and its keys; what other ranks hold is on the meta device here.
Holds the public call and what a step is made of; where the model is cut is pipeline_plan's.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from rankwise.agreement import all_ranks_succeed
from rankwise.collectives import gather_json
from rankwise.errors import ConfigurationError
from rankwise.log import log, warn
from rankwise.parallel.buffers import BufferSync
from rankwise.parallel.device_mesh import axes_for, exchange_along, submesh
from rankwise.parallel.gradient_mean import GradientMean, clip_to_norm
from rankwise.parallel.pipeline import micro_batches as parts
from rankwise.parallel.pipeline.picture import Picture, write_picture
from rankwise.parallel.pipeline.plan import Piped, Plan, StageReport, check_axes, checked_count, plan_of
from rankwise.parallel.pipeline.schedule import Action, predicting_order, schedule_of, training_order
from rankwise.parallel.pipeline.step import Link, MicroBatch, Span, StepRun, now
from rankwise.parallel.same_model import broadcast_model, check_same_model
from rankwise.parallel.trained import check_untrained, note_trained
from rankwise.session import current

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from rankwise.exchange.protocol import Exchange
    from rankwise.parallel.pipeline.program import Program

LOSS_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def pipeline(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], torch.Tensor],
    *,
    example: object,
    micro_batches: int | None = None,
    schedule: str = "1f1b",
    split: Sequence[str] | None = None,
    weight: Callable[[Any], float | torch.Tensor] | None = None,
) -> Pipeline:
    """Put stages of ``model`` on different ranks, in place; return the step that trains it.

    Called by: every rank, with the same model, before the optimizer is built.

    ``loss = step(x, target)`` stands for ``loss = loss_fn(model(x), target); loss.backward()``: afterwards every rank
    has, in the parameters of its stages, the gradients one device would have, for every batch size and number of
    micro-batches. Every rank starts from rank zero's parameters and keeps those of its stages; the others become
    meta tensors, without memory, so that names, order and ``state_dict`` keys stay, and an optimizer built afterwards
    numbers parameters alike on every rank. The ranks lie along ``pp``; where :func:`rankwise.mesh` has
    ``dp_replicate`` too, gradients are means over all samples of all pipelines.

    The model is cut between blocks: layers, and what repeats (a residual block, a decoder layer) as a whole. What
    ``forward`` does between blocks may be anything whose shapes follow from the shapes of the inputs; values that skip
    stages travel through those in between, and what depends on the inputs alone is computed by every stage.

    BatchNorm in training mode takes its statistics per micro-batch, so that the result depends on their number;
    dropout is drawn per stage. This rank has the gradients of its own stages only: clip them with
    :meth:`Pipeline.clip_grad_norm_`. Hooks on ``model`` itself do not run; those on its blocks do.

    Args:
        model: on its device already, whole on every rank. Change its layers, dtype or device before.
        loss_fn: called with the model's output and the target of a micro-batch; returns the mean over its samples.
        example: a batch as ``model`` would be called with: a tensor, a tuple of arguments or a dict of them by name.
            Of any size; the closer to the training's, the better the balance.
        micro_batches: how many parts a batch is run in. Default: the number of stages.
        schedule: ``"gpipe"``, ``"1f1b"``, ``"interleaved_1f1b"``, ``"interleaved_zero_bubble"`` or
            ``"zbv_zero_bubble"``; the last three have two stages per rank.
        split: names of the modules that each stage but the first begins with. Default: so that the measured forward
            and backward of the most expensive stage is shortest.
        weight: called with the target of a micro-batch; returns what its loss is a mean over, where that is not its
            samples (tokens): at least zero.

    Raises:
        NotJoined: before :func:`rankwise.join`.
        ModelMismatch: parameters or buffers differ in number, name, shape or dtype between ranks.
        ConfigurationError: the model cannot be cut so; on every rank, and nothing has changed.

    Source: torch.distributed.pipelining, whose schedules order a step.
    """
    session = current()
    axes = axes_for("pipeline", "pp")
    with all_ranks_succeed("rankwise.pipeline()"):
        check_axes(axes)
        check_untrained(model, "pipeline")
        chosen = schedule_of(schedule)
        num_micro_batches = checked_count(micro_batches, chosen, axes.pp)
        plan = plan_of(model, chosen, axes.pp)
        args, kwargs = parts.first_part(example, num_micro_batches)
        program = plan.trace(args, kwargs)
    costs: dict[str, float] | None = None
    if split is None and plan.num_stages > 1:
        with all_ranks_succeed("measuring the blocks of the model"):
            # Ranks along tp compute together.
            if session.world.rank == 0 or axes.tp > 1:
                costs = plan.measure(program, args, kwargs)
        costs = gather_json(costs)[0]
    with all_ranks_succeed("rankwise.pipeline()"):
        plan.settle(program, split, costs)
    if session.exchange is not None:
        check_same_model(model)
        for axis in ("pp", "dp_replicate"):
            along = exchange_along(axis)
            if along is not None:
                broadcast_model(model, along)
    place = axes.coordinate(session.world.rank, "pp")
    plan.give_up(place)
    note_trained(model, cast("Any", Piped(plan.own_parameters(place))))
    step = Pipeline(plan, loss_fn, num_micro_batches, weight, place)
    log(f"pipeline: {type(model).__name__} in {plan.num_stages} stages, {chosen.name}\n{step}")
    return step


class Pipeline:
    """The step of a pipeline, from :func:`pipeline` until the world is left. Called like the model with its loss."""

    def __init__(
        self,
        plan: Plan,
        loss_fn: Callable[[Any, Any], torch.Tensor],
        num_micro_batches: int,
        weight: Callable[[Any], float | torch.Tensor] | None,
        place: int,
    ) -> None:
        session = current()
        world = session.world
        axes = axes_for("pipeline", "pp")
        self._plan = plan
        self._loss_fn = loss_fn
        self._num_micro_batches = num_micro_batches
        self._weight = weight
        self._place = place
        self._last_place = plan.schedule.rank_of(plan.num_stages - 1, plan.num_ranks)
        self._along: Exchange | None = exchange_along("pp")
        group = submesh("pp").get_group() if axes.pp > 1 else None
        self._link = Link(group, axes.ranks_along(world.rank, "pp"), plan.device, session.watch)
        copies = exchange_along("dp_replicate")
        self._mean = (
            None
            if copies is None
            else GradientMean(plan.own_parameters(place), copies, f"gradients of {type(plan.model).__name__}")
        )
        self._buffers = None if copies is None else BufferSync(plan.own_buffers(place), copies)
        self._loss_dtype: torch.dtype | None = None
        self._spans: list[tuple[str, int, int, float, float]] | None = None
        self._picture: Picture | None = None
        self._has_warned = False

    def __call__(self, x: object, target: object) -> torch.Tensor:
        """Compute the loss of a batch, and add its gradients to those of the parameters.

        Called by: every rank; ranks of one pipeline with the same batch. :class:`rankwise.DataLoader` gives it so.

        A batch is split into micro-batches of sizes as even as they go; each counts by its samples, or by
        ``weight``, so that the split does not show in the result. One with fewer samples than micro-batches runs in
        fewer. With several pipelines one may have no samples. Calls without ``zero_grad`` between them add up, as
        backward does: to the sum of the calls' means.

        Args:
            x: what the model is called with; tensors are [samples, ...].
            target: a tensor, or a tree of them, [samples, ...].

        Returns:
            The mean loss over the batch, without a graph; the same on every rank of this pipeline.

        Raises:
            ConfigurationError: ``x`` and ``target`` do not go together.
            PeerFailed: another rank failed.
        """
        samples = parts.common_samples(x, target)
        if samples == 0 and self._mean is None:
            raise ConfigurationError("The batch has no samples.", do="skip it, on every rank")
        if self._mean is not None:
            self._mean.begin()
        if self._buffers is not None and self._plan.model.training:
            self._buffers.before_forward()
        loss = torch.full((), math.nan, device=self._plan.device)
        total = 0.0
        if samples:
            with torch.enable_grad():
                loss, total = self._train(x, target, samples)
        if self._mean is not None:
            self._mean.average(total)
        return loss

    def predict(self, x: object) -> Any:  # noqa: ANN401 - whatever the model returns
        """Return the model's output for a batch, on every rank of the pipeline, without gradients.

        Called by: every rank of the pipeline, with the same batch. The model runs as ``model.train()`` or
        ``model.eval()`` have set it.

        Raises:
            ConfigurationError: the output has a tensor without a row per sample.
        """
        args, kwargs = parts.arguments(x)
        samples = parts.num_samples((args, kwargs), "x")
        sizes = parts.sizes_of(samples, min(self._num_micro_batches, max(samples, 1)))
        with torch.no_grad():
            run, programs = self._prepared((args, kwargs), sizes, None, [0.0] * len(sizes))
            parts.check_rows([program.output_shapes() for program in programs], sizes)
            run.run(predicting_order(self._plan.schedule.name, self._plan.num_ranks, len(sizes))[self._place])
            outputs = [pytree.tree_leaves(run.outputs[number]) for number in sorted(run.outputs)]
            return self._shared(programs[0], outputs, samples)

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients down to a norm of at most ``max_norm`` over the whole model; return what it was.

        Called by: every rank of the pipeline, after a step. torch's own sees the stages of one rank only.

        Source: torch.nn.utils.clip_grad_norm_, the 2-norm.
        """
        parameters = self._plan.own_parameters(self._place)
        return clip_to_norm(parameters, max_norm, self._along, self._plan.device)

    @contextmanager
    def measure(self) -> Generator[None]:
        """Note when each rank computes what, in the steps inside the block; the last one is drawn by :meth:`draw`.

        Called by: every rank of the pipeline. On a GPU a step is slower meanwhile: each part is waited for.
        """
        self._spans = []
        try:
            yield
        finally:
            self._spans = None

    def draw(self, path: str | Path) -> None:
        """Draw the last measured step: what each rank did when, and how long it waited.

        Called by: any ranks; the one of the world's rank zero writes, and the others do nothing.

        Args:
            path: ends in ``.svg``, or in ``.png``, which needs matplotlib.

        Raises:
            ConfigurationError: no step was measured, or the file's ending is another.
        """
        if self._picture is None:
            raise ConfigurationError(
                "There is no measured step to draw.", do="run one: with step.measure(): step(x, target)"
            )
        if current().world.rank == 0:
            write_picture(self._picture, Path(path))

    @property
    def bubble(self) -> float | None:
        """The share of the last measured step in which ranks waited; ``None`` where none was measured."""
        return None if self._picture is None else self._picture.bubble

    @property
    def stages(self) -> list[StageReport]:
        """What each stage is: its rank, its blocks, its share of the cost."""
        return self._plan.reports()

    def __str__(self) -> str:
        lines: list[str] = []
        for stage in self.stages:
            names = stage.blocks[0] if len(stage.blocks) == 1 else f"{stage.blocks[0]} to {stage.blocks[-1]}"
            share = "" if stage.cost_share is None else f", {stage.cost_share:.0%} of the cost"
            lines.append(f"  stage {stage.number} on pp {stage.rank}: {names} ({len(stage.blocks)} blocks{share})")
        return "\n".join(lines)

    # -- a step ------------------------------------------------------------------------------------

    def _train(self, x: object, target: object, samples: int) -> tuple[torch.Tensor, float]:
        plan = self._plan
        count = plan.schedule.most(min(self._num_micro_batches, samples), plan.num_ranks)
        sizes = parts.sizes_of(samples, count)
        if count > 1 and not self._has_warned:
            self._warn_of_batchnorm()
        spec = pytree.tree_flatten(target)[1]
        targets = [pytree.tree_unflatten(leaves, spec) for leaves in parts.split(target, sizes)]
        weights = [self._weight_of(one, size) for one, size in zip(targets, sizes, strict=True)]
        total = sum(weights)
        shares = [weight / total if total else 0.0 for weight in weights]
        run, _ = self._prepared(parts.arguments(x), sizes, targets, shares)
        order = training_order(plan.schedule.name, plan.num_ranks, count)
        began = self._begin_measuring()
        run.spans = self._spans
        run.run(order[self._place])
        if self._spans is not None:
            self._picture = self._gathered(order, began)
        return self._shared_loss(run.losses), total

    def _warn_of_batchnorm(self) -> None:
        norms = [
            n for n, module in self._plan.model.named_modules() if isinstance(module, _BatchNorm) and module.training
        ]
        if norms:
            self._has_warned = True
            warn(
                f"{norms[0]} and {len(norms) - 1} more BatchNorm layers take their statistics per micro-batch; "
                "micro_batches=1, or GroupNorm, makes the result that of one device"
            )

    def _prepared(
        self,
        x: tuple[tuple[Any, ...], dict[str, Any]],
        sizes: Sequence[int],
        targets: Sequence[Any] | None,
        shares: Sequence[float],
    ) -> tuple[StepRun, list[Program]]:
        plan = self._plan
        spec = pytree.tree_flatten(x)[1]
        programs: list[Program] = []
        found: list[MicroBatch] = []
        bound: dict[int, Any] = {}
        for number, (leaves, size) in enumerate(zip(parts.split(x, sizes), sizes, strict=True)):
            if size not in bound:
                args, kwargs = pytree.tree_unflatten(leaves, spec)
                bound[size] = plan.bound(args, kwargs, self._place)
            program, stages = bound[size]
            programs.append(program)
            found.append(MicroBatch(leaves, None if targets is None else targets[number], shares[number], stages))
        self._link.begin(f"a step of the pipeline of {type(plan.model).__name__}")
        loss_fn = None if targets is None else self._loss_fn
        return StepRun(found, self._link, lambda stage: plan.schedule.rank_of(stage, plan.num_ranks), loss_fn), programs

    def _weight_of(self, target: object, size: int) -> float:
        weight = float(size if self._weight is None else self._weight(target))
        if not (math.isfinite(weight) and weight >= 0):
            raise ConfigurationError(
                f"The weight of a micro-batch must be zero or more, not {weight}.",
                do="return the number of samples or tokens its loss is the mean of",
            )
        return weight

    def _shared_loss(self, losses: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the last stage's loss on every rank."""
        loss = torch.stack(list(losses)).sum() if losses else torch.zeros((), device=self._plan.device)
        if self._along is None:
            return loss
        if self._loss_dtype is None:
            code = LOSS_DTYPES.index(loss.dtype) if losses else 0
            known = torch.tensor([code], device=self._plan.device)
            self._loss_dtype = LOSS_DTYPES[
                int(self._along.broadcast(known, self._last_place, what="dtype of the loss"))
            ]
        return self._along.broadcast(loss.to(self._loss_dtype), self._last_place, what="loss of the pipeline")

    def _shared(self, program: Program, outputs: Sequence[Sequence[Any]], samples: int) -> Any:  # noqa: ANN401
        """Return the last stage's output on every rank."""
        whole: list[Any] = []
        for index, leaf in enumerate(program.output):
            kind = program.kinds[leaf.number] if hasattr(leaf, "number") else None
            if kind is None:
                whole.append(leaf)
                continue
            if outputs:
                value = torch.cat([one[index] for one in outputs])
            else:
                value = torch.empty((samples, *kind.shape[1:]), dtype=kind.dtype, device=self._plan.device)
            if self._along is not None:
                value = self._along.broadcast(value.contiguous(), self._last_place, what="output of the pipeline")
            whole.append(value)
        return pytree.tree_unflatten(whole, cast("pytree.TreeSpec", program.output_spec))

    # -- measuring ---------------------------------------------------------------------------------

    def _begin_measuring(self) -> float:
        if self._spans is None:
            return 0.0
        self._spans.clear()
        # The ranks' clocks need not agree, so each counts from where all have met.
        if self._along is not None:
            self._along.meet("beginning of a measured step")
        return now(self._plan.device)

    def _gathered(self, order: Sequence[Sequence[Action]], began: float) -> Picture:
        own = [(start - began, end - began) for *_, start, end in self._spans or ()]
        rows = max(len(actions) for actions in order)
        times = torch.full((rows, 2), math.nan, dtype=torch.float64, device=self._plan.device)
        times[: len(own)] = torch.tensor(own, dtype=torch.float64)
        all_times = times[None] if self._along is None else self._along.all_gather(times, what="times of a step")
        spans = [
            Span(rank, action.kind, action.stage, action.micro_batch, start, end)
            for rank, (actions, of_rank) in enumerate(zip(order, all_times.tolist(), strict=True))
            for action, (start, end) in zip([one for one in actions if one.computes], of_rank, strict=False)
        ]
        return Picture(self._plan.schedule.name, self._plan.num_stages, tuple(spans))
