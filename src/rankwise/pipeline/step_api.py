# SPDX-License-Identifier: Apache-2.0
"""The step that pipeline() returns: trains on a batch, predicts, clips gradients, and draws the schedule."""

from __future__ import annotations

import math
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from rankwise.comm.session import current, current_or_none
from rankwise.errors import ConfigurationError
from rankwise.health.event_log import Failed, post
from rankwise.health.traceback_folds import formatted
from rankwise.log import warn
from rankwise.meter import note_layout
from rankwise.pipeline.executor import (
    ActionSpan,
    MeasuredStep,
    MicroBatch,
    StepRun,
    arguments_of,
    check_rows,
    common_samples,
    micro_batch_sizes,
    now,
    num_samples,
    rows_like,
    split_leaves,
    write_picture,
)
from rankwise.pipeline.link import PipelineLink, open_rings
from rankwise.pipeline.loss_on_stages import LossOnStages, MicroBatchLosses, StepWeight
from rankwise.pipeline.schedule import Action, predicting_order, training_order
from rankwise.pipeline.stage_executor import StageDraws
from rankwise.pipeline.stage_gradients import StepGradients
from rankwise.pipeline.stages import Ref
from rankwise.replicate.buffers import BufferSync
from rankwise.replicate.device_mesh import axes_for, exchange_along, submesh
from rankwise.replicate.gradient_hooks import ModuleHooks
from rankwise.replicate.loss.batch_statistics import FollowedLoss
from rankwise.replicate.loss.graph import amount_of, check_weight, given_weight, ratio
from rankwise.replicate.loss.hooks import forget_losses, warn_unless_finite
from rankwise.replicate.same_model import describe_arguments
from rankwise.replicate.sparse_gradients import sparse_layers
from rankwise.torch_private.dtensor import own_part
from rankwise.torch_private.modules import BatchNorm
from rankwise.torch_private.tensors import TreeSpec, tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from rankwise.world.device.streams import forget_checks, run_checks

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from torch import nn

    from rankwise.comm.backends.protocol import Amount, Exchange
    from rankwise.pipeline.plan import StagedModel, StagePlan, StageReport
    from rankwise.pipeline.stages import Program
    from rankwise.store.client import Store


class Pipeline:
    """The step of a pipeline, from :func:`pipeline` until the world is left. Called like the model with its loss.

    Its many fields are the parts of a step, each opened once: a step is all of them in one order.
    """

    def __init__(
        self,
        plan: StagePlan,
        loss_fn: Callable[[Any, Any], torch.Tensor],
        num_micro_batches: int,
        weight: Callable[[Any], float | torch.Tensor] | None,
        *,
        place: int,
        first: Callable[[nn.Module, object], None],
        piped: StagedModel,
    ) -> None:
        session = current()
        world = session.world
        axes = axes_for("pipeline", "pp")
        self._plan = plan
        self._loss_fn = FollowedLoss(loss_fn)
        self._num_micro_batches = num_micro_batches
        self._weight = weight
        self._place = place
        self._first = first
        self._piped = piped
        self._last_place = plan.schedule.rank_of(plan.num_stages - 1, plan.num_ranks)
        self._along: Exchange | None = exchange_along("pp")
        group = submesh("pp").get_group() if axes.pp > 1 else None
        world_exchange = session.exchange if axes.tp == 1 else None
        rings = open_rings(world_exchange, self._along, plan.neighbours(), plan.sent_bytes)
        self._link = PipelineLink(group, axes.ranks_along(world.rank, "pp"), plan.device, session.detector, rings)
        copies = exchange_along("dp_replicate")
        named = {name: one for name, one in plan.model.named_parameters() if plan.holds(name, place)}
        what = f"gradients of {type(plan.model).__name__}"
        self._gradients = StepGradients(named, copies, what, sparse_layers(plan.model))
        self._has_copies = copies is not None
        self._module_hooks = ModuleHooks(plan.model, is_in_stages=True) if copies or num_micro_batches > 1 else None
        losses = MicroBatchLosses(list(named.values()))
        self._losses = losses if weight is None and place == self._last_place else None
        """On the last stage only."""
        self._loss = LossOnStages(
            self._losses,
            self._along,
            copies,
            last_place=self._last_place,
            cautions=piped.cautions,
            device=plan.device,
        )
        self._buffers = None if copies is None else BufferSync(plan.own_buffers(place), copies)
        self._spans: list[tuple[float, float]] | None = None
        self._measured: MeasuredStep | None = None
        self._draws = StageDraws(session, plan.model)
        self._has_warned = False
        self._looked_at: Program | None = None
        self._num_begun = 0
        self._broken: str | None = None
        session.on_leave(partial(run_checks, waits=True))
        session.before_save(partial(run_checks, waits=True))
        session.at_end(forget_checks)
        session.at_end(forget_losses)

    def __call__(self, x: object, target: object) -> torch.Tensor:
        """Compute the loss of a batch, and add its gradients to those of the parameters.

        Called by: every rank; ranks of one pipeline with the same batch. :class:`rankwise.DataLoader` gives it so.

        A batch is split into micro-batches of nearly equal size, weighted by the number their loss is a mean over or by
        ``weight``, so that the split does not affect the result. A batch with fewer samples than micro-batches is
        split into fewer. With several pipelines one may have no samples. Calls without ``zero_grad`` between them add
        up, as backward does.

        Args:
            x: what the model is called with; tensors are [samples, ...].
            target: a tensor, or a tree of them, [samples, ...].

        Returns:
            The loss of this pipeline's batch, without a graph; the same on every rank of this pipeline.

        Raises:
            ConfigurationError: ``x`` and ``target`` do not match, the ranks of the pipeline received different values
                (in the first steps), or an earlier step was aborted.
            CollectiveMismatch: the ranks of the pipeline received batches of different shapes; nothing was sent.
            PeerFailed: another rank failed.
        """
        samples = common_samples(x, target)
        if samples == 0 and not self._has_copies:
            raise ConfigurationError("The batch has no samples.", do="skip it, on every rank")
        arguments = arguments_of(x)
        self._begin("step", arguments, target)
        # Raises what can be refused before anything changes.
        prepared = self._prepared_step(arguments, target, samples) if samples else None
        if prepared is None:
            self._draw_nothing(arguments)
        is_read = self._is_read(prepared)
        self._gradients.begin(has_factor=is_read)
        try:
            if self._buffers is not None and self._plan.model.training:
                self._buffers.before_forward()
            loss, step = self._train(prepared, samples, is_read=is_read)
        except BaseException:
            self._gradients.give_up()
            raise
        self._piped.note_weight(self._gradients.finish(step))
        return loss

    def predict(self, x: object) -> Any:
        """Return the model's output for a batch, on every rank of the pipeline, without gradients.

        Called by: every rank of the pipeline, with the same batch. The model runs in its current mode (``train()`` or
        ``eval()``).

        Raises:
            ConfigurationError: the output has a tensor without a row per sample, or as for a step.
            CollectiveMismatch: the ranks received batches of different shapes.
        """
        args, kwargs = arguments_of(x)
        samples = num_samples((args, kwargs), "x")
        sizes = micro_batch_sizes(samples, min(self._num_micro_batches, max(samples, 1)))
        self._begin("predict", (args, kwargs), ())
        with torch.no_grad():
            run, programs = self._prepared((args, kwargs), sizes, None, [0.0] * len(sizes))
            for program, size in zip(programs, sizes, strict=True):
                check_rows(program.output_shapes(), size)
            with self._notifying_others():
                run.run(predicting_order(self._plan.schedule.name, self._plan.num_ranks, len(sizes))[self._place])
            outputs = [tree_leaves(run.outputs[number]) for number in sorted(run.outputs)]
            return self._shared(programs[0], outputs, samples)

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients down to a norm of at most ``max_norm`` over the whole model; return the norm before.

        Called by: every rank of the pipeline, after a step. The same as torch's, which a pipeline replaces.

        Raises:
            ConfigurationError: ``max_norm`` is negative.

        Source: ``torch.nn.utils.clip_grad_norm_``, the 2-norm.
        """
        if not isinstance(max_norm, int | float | torch.Tensor) or not max_norm >= 0:
            raise ConfigurationError(
                f"max_norm must be a number of at least 0, got {max_norm!r}.", do="pass clip_grad_norm_(1.0)"
            )
        norm: Any = torch.nn.utils.clip_grad_norm_(self._plan.own_parameters(self._place), float(max_norm))
        return norm if own_part(norm) is norm else norm.full_tensor()

    @contextmanager
    def measure(self) -> Generator[None]:
        """Measure the steps inside the block; :meth:`draw` draws the last one.

        Called by: every rank of the pipeline. On a GPU measured steps are slower, since each part is waited for.
        """
        self._spans = []
        try:
            yield
        finally:
            self._spans = None
        if self._measured is not None and current().world.rank == 0:
            note_layout("schedule", title=self._measured.title, spans=self._measured.rows)

    def draw(self, path: str | Path) -> None:
        """Draw the last measured step: when each rank computed, and when it waited.

        Called by: any ranks; rank zero of the world writes, and the others do nothing.

        Args:
            path: ends in ``.svg``. The picture is that of the step in a report.

        Raises:
            ConfigurationError: no step was measured, ``path`` ends otherwise, or its folder does not exist.
        """
        if self._measured is None:
            raise ConfigurationError(
                "No step has been measured yet.", do="measure one: with step.measure(): step(x, target)"
            )
        if current().world.rank == 0:
            write_picture(self._measured, Path(path))

    @property
    def bubble(self) -> float | None:
        """The share of the last measured step in which ranks waited; ``None`` where none was measured."""
        return None if self._measured is None else self._measured.bubble

    @property
    def stages(self) -> list[StageReport]:
        """The rank, blocks and share of the cost of each stage."""
        return self._plan.reports()

    def __str__(self) -> str:
        lines: list[str] = []
        for stage in self.stages:
            names = stage.blocks[0] if len(stage.blocks) == 1 else f"{stage.blocks[0]} to {stage.blocks[-1]}"
            share = "" if stage.cost_share is None else f", {stage.cost_share:.0%} of the cost"
            lines.append(f"  stage {stage.number} on pp {stage.rank}: {names} ({len(stage.blocks)} blocks{share})")
        return "\n".join(lines)

    # -- a step ------------------------------------------------------------------------------------

    def _begin(self, what: str, arguments: tuple[tuple[Any, ...], dict[str, Any]], target: object) -> None:
        """Check that every rank of the pipeline does the same, before anything is sent: Gloo would abort."""
        if self._broken is not None:
            raise ConfigurationError(
                "An earlier step of this pipeline was aborted, and other ranks are waiting in the middle of it.",
                evidence=self._broken,
                do="do not catch the first error; resume from a checkpoint",
            )
        run_checks()
        self._num_begun += 1
        name = type(self._plan.model).__name__
        mode = "training" if self._plan.model.training else "evaluation"
        if self._along is not None:
            inputs = f"x={describe_arguments(*arguments)}, target={describe_arguments([target], {})}"
            self._along.barrier(f"{what} {self._num_begun} of the pipeline of {name}, in {mode} mode: {inputs}")
        self._first(self._plan.model, (arguments, target))
        if self._module_hooks is not None:
            self._module_hooks.before_forward(self._plan.model, None)

    def _prepared_step(
        self, arguments: tuple[tuple[Any, ...], dict[str, Any]], target: object, samples: int
    ) -> tuple[StepRun, Sequence[Sequence[Action]], Amount]:
        """Return the step, its actions, and the number its loss is a mean over."""
        plan = self._plan
        count = plan.schedule.most(min(self._num_micro_batches, samples), plan.num_ranks)
        sizes = micro_batch_sizes(samples, count)
        spec = tree_flatten(target)[1]
        targets = [tree_unflatten(leaves, spec) for leaves in split_leaves(target, sizes)]
        weights = [self._weight_of(one, size) for one, size in zip(targets, sizes, strict=True)]
        total: Amount = sum(weights)
        shares = [ratio(weight, total) for weight in weights]
        with torch.enable_grad():
            run, programs = self._prepared(arguments, sizes, targets, shares)
        if (count > 1 or self._has_copies) and programs[0] is not self._looked_at and not self._has_warned:
            self._looked_at = programs[0]
            self._warn_of_states(programs[0])
        return run, training_order(plan.schedule.name, plan.num_ranks, count), total

    def _draw_nothing(self, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        """Take part in a step in which other copies draw random numbers for their samples."""
        args, kwargs = tree_map_only(torch.Tensor, partial(rows_like, num=1), arguments)
        with torch.enable_grad():
            if self._plan.bound(args, kwargs, self._place)[0].num_draws:
                self._draws.begin((), 0)

    def _is_read(self, prepared: tuple[StepRun, Sequence[Sequence[Action]], Amount] | None) -> bool:
        """Return whether the weight of a step is read from its losses; the same on every rank."""
        is_elsewhere = self._has_copies or self._piped.on_mean is not None
        return self._weight is None and (is_elsewhere or prepared is None or len(prepared[0].micro_batches) > 1)

    def _train(
        self, prepared: tuple[StepRun, Sequence[Sequence[Action]], Amount] | None, samples: int, *, is_read: bool
    ) -> tuple[torch.Tensor, StepWeight]:
        run, order, total = prepared or (None, (), 0.0)
        if self._losses is not None:
            self._losses.begin(samples)
        if run is not None:
            began = self._begin_measuring()
            scale_of = self._losses.scale if self._losses is not None and is_read else None
            with torch.enable_grad(), self._notifying_others():
                run.run(order[self._place], scale_of=scale_of, spans=self._spans)
            if self._spans is not None:
                self._measured = self._gathered(order, began)
            if self._along is not None:
                self._along.detector.recorder.note_step(self._num_begun)
        if run is not None and run.losses:
            warn_unless_finite(
                current_or_none(),
                run.losses,
                parts=[(one.first, one.num_samples) for one in run.micro_batches],
                advice="skip such a step on every rank of the pipeline, to all of which step() returns the loss",
            )
        losses = [] if run is None else run.losses
        step, loss = StepWeight(1.0, total, total, None), None
        if is_read:
            with self._notifying_others():
                step, loss = self._loss.agree(losses)
        if self._loss_fn.statistic is not None:
            self._loss.warn_of_statistic(self._loss_fn.statistic)
        if run is None:
            return torch.full((), math.nan, device=self._plan.device), step
        return self._loss.value(losses) if loss is None else loss, step

    @contextmanager
    def _notifying_others(self) -> Generator[None]:
        """If the block raises, notify the ranks that wait for the rest of the step."""
        try:
            yield
        except BaseException as error:
            self._broken = f"{type(error).__name__}: {error}"
            session = current()
            can_notify = session.store is not None and session.detector is not None and session.detector.error is None
            if can_notify and isinstance(error, Exception):
                world, text = session.world, formatted(error)
                post(cast("Store", session.store), Failed(world.rank, type(error).__name__, text, world.hostname))
            raise

    def _warn_of_states(self, program: Program) -> None:
        model = self._plan.model
        norms = [n for n, module in model.named_modules() if isinstance(module, BatchNorm) and module.training]
        others = [name for name in program.changed_states if name.rpartition(".")[0] not in norms]
        if norms:
            take = f"s {norms[0]!r} and {len(norms) - 1} more take their" if norms[1:] else f" {norms[0]!r} takes its"
            of, do = ("", "micro_batches=1, or GroupNorm,")
            if self._has_copies:
                of, do = " of each copy", "GroupNorm"
            warn(f"the BatchNorm layer{take} statistics per micro-batch{of}; {do} makes the result that of one device")
        if others:
            do = "change them after the step" if self._has_copies else "micro_batches=1 does so too"
            warn(f"forward changes {', '.join(others)} per micro-batch, and on one device per batch; {do}")
        self._has_warned = bool(norms or others)

    def _prepared(
        self,
        x: tuple[tuple[Any, ...], dict[str, Any]],
        sizes: Sequence[int],
        targets: Sequence[Any] | None,
        shares: Sequence[Amount],
    ) -> tuple[StepRun, list[Program]]:
        plan = self._plan
        spec = tree_flatten(x)[1]
        programs: list[Program] = []
        found: list[MicroBatch] = []
        bound: dict[int, Any] = {}
        for number, (leaves, size) in enumerate(zip(split_leaves(x, sizes), sizes, strict=True)):
            if size not in bound:
                args, kwargs = tree_unflatten(leaves, spec)
                bound[size] = plan.bound(args, kwargs, self._place)
            program, stages = bound[size]
            programs.append(program)
            target = None if targets is None else targets[number]
            found.append(MicroBatch(leaves, target, shares[number], sum(sizes[:number]), size, stages))
        if programs[0].num_draws:
            self._draws.begin(tree_leaves(x), sum(sizes))
        self._link.begin(f"a step of the pipeline of {type(plan.model).__name__}")
        is_part = self._has_copies or len(sizes) > 1
        if is_part:
            self._loss_fn.note_outputs(self._plan.statistics or ())
        loss_fn = None if targets is None else self._loss_fn if is_part else self._loss_fn.plain
        rank_of = partial(plan.schedule.rank_of, num_ranks=plan.num_ranks)
        return StepRun(found, self._link, rank_of, loss_fn, self._draws), programs

    def _weight_of(self, target: object, size: int) -> Amount:
        weight = (
            amount_of(size) if self._weight is None else given_weight(self._weight, (target,), {}, "loss_fn's target")
        )
        check_weight(weight, "micro-batch", self._num_begun)
        return weight

    def _shared(self, program: Program, outputs: Sequence[Sequence[Any]], samples: int) -> Any:
        whole: list[Any] = []
        for index, leaf in enumerate(program.output):
            kind = program.kinds[leaf.number] if isinstance(leaf, Ref) else None
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
        return tree_unflatten(whole, cast("TreeSpec", program.output_spec))

    # -- measuring ---------------------------------------------------------------------------------

    def _begin_measuring(self) -> float:
        if self._spans is None:
            return 0.0
        self._spans.clear()
        # Clocks of ranks may differ, so each counts from this meeting.
        if self._along is not None:
            self._along.barrier("beginning of a measured step")
        return now(self._plan.device)

    def _gathered(self, order: Sequence[Sequence[Action]], began: float) -> MeasuredStep:
        own = [(start - began, end - began) for start, end in self._spans or ()]
        rows = max(len(actions) for actions in order)
        times = torch.full((rows, 2), math.nan, dtype=torch.float64, device=self._plan.device)
        times[: len(own)] = torch.tensor(own, dtype=torch.float64)
        all_times = times[None] if self._along is None else self._along.all_gather(times, what="times of a step")
        spans = [
            ActionSpan(rank, action.kind, action.stage, action.micro_batch, start, end)
            for rank, (actions, of_rank) in enumerate(zip(order, all_times.tolist(), strict=True))
            for action, (start, end) in zip([one for one in actions if one.computes], of_rank, strict=False)
        ]
        return MeasuredStep(self._plan.schedule.name, self._plan.num_stages, tuple(spans))
