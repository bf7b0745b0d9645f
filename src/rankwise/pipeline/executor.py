# SPDX-License-Identifier: Apache-2.0
"""One step of a pipeline on this rank: runs its actions in order, and notes when each ran; a measured step's picture.

The actions come from schedule; a stage is computed by stage_executor. In order: a batch as parts of nearly equal size;
the step; the picture. Used by step_api.
"""

from __future__ import annotations

import time
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch

from rankwise.charts import duration, picture_of, schedule_legend, schedule_rows, spans
from rankwise.errors import ConfigurationError
from rankwise.pipeline import schedule as kinds
from rankwise.pipeline.stage_executor import BoundStage, HeldActivations, received_like
from rankwise.replicate.loss.graph import is_zero
from rankwise.torch_private.tensors import tree_flatten, tree_leaves, tree_unflatten

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence
    from pathlib import Path

    from rankwise.charts import Measured
    from rankwise.comm.backends.protocol import Amount
    from rankwise.pipeline.link import PipelineLink, Transfer
    from rankwise.pipeline.schedule import Action
    from rankwise.pipeline.stage_executor import StageDraws


@dataclass(frozen=True, slots=True)
class ActionSpan:
    """When a rank ran one forward or backward, in seconds since the step began."""

    rank: int
    kind: str
    stage: int
    micro_batch: int
    start: float
    end: float


# -- a batch as parts of nearly equal size ---------------------------------------------------------------


def arguments_of(x: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return ``(args, kwargs)`` to call the model with: a tuple or list is several, a dict is by name."""
    if isinstance(x, dict):
        # In one order, so that ranks need not agree on theirs.
        named = cast("dict[str, Any]", x)
        return (), {name: named[name] for name in sorted(named, key=str)}
    if isinstance(x, list | tuple) and not hasattr(x, "_fields"):
        return tuple(cast("tuple[Any, ...]", x)), {}
    return (x,), {}


def num_samples(value: object, what: str) -> int:
    """Return the first dimension of the tensors of a tree.

    Raises:
        ConfigurationError: they differ, or there is none.
    """
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.ndim]
    sizes = sorted({tensor.shape[0] for tensor in tensors})
    if len(sizes) != 1:
        raise ConfigurationError(
            f"{what} does not have one number of samples.",
            evidence="first dimensions: " + (", ".join(map(str, sizes)) if sizes else "no tensor has rows"),
            do="pass tensors whose first dimension is the batch",
        )
    return sizes[0]


def micro_batch_sizes(total: int, count: int) -> list[int]:
    """Return ``count`` sizes that sum to ``total``, as equal as possible, the first ones larger."""
    least, larger = divmod(total, count)
    return [least + (index < larger) for index in range(count)]


def split_leaves(value: object, sizes: Sequence[int]) -> list[list[Any]]:
    """Return per part the leaves of a tree; tensors are split along dimension 0, other leaves repeated."""
    columns: list[Sequence[Any]] = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor) and leaf.ndim:
            columns.append(leaf.split(list(sizes)))
        else:
            columns.append([leaf] * len(sizes))
    return [[column[index] for column in columns] for index in range(len(sizes))]


def rows_like(tensor: torch.Tensor, num: int) -> torch.Tensor:
    """Return a tensor of zeros for another number of samples."""
    return tensor.new_zeros((num, *tensor.shape[1:])) if tensor.dim() else tensor


def check_rows(shapes: Iterable[tuple[int, ...]], size: int) -> None:
    """Raise a ConfigurationError unless tensors of these shapes have a row for each of ``size`` samples."""
    for shape in shapes:
        if shape[:1] != (size,):
            raise ConfigurationError(
                "The model's output has a tensor without a row per sample.",
                evidence=f"{list(shape)} for a micro-batch of {size} samples",
                do="return values per sample from the model",
            )


def first_part(example: object, num_micro_batches: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the first micro-batch of an example, as the model is called with it.

    Raises:
        ConfigurationError: the example has no samples, or no one number of them.
    """
    x = arguments_of(example)
    samples = num_samples(x, "example")
    if samples == 0:
        raise ConfigurationError("The example has no samples.", do="pass a batch like those used in training")
    sizes = micro_batch_sizes(samples, min(num_micro_batches, samples))
    return tree_unflatten(split_leaves(x, sizes)[0], tree_flatten(x)[1])


def common_samples(x: object, target: object) -> int:
    """Return how many samples a batch has.

    Raises:
        ConfigurationError: ``x`` and ``target`` differ, or have no one number of samples.
    """
    samples = num_samples(arguments_of(x), "x")
    of_target = num_samples(target, "target")
    if samples != of_target:
        raise ConfigurationError(
            f"x has {samples} samples, but target has {of_target}.", do="pass x and target of the same batch"
        )
    return samples


@dataclass(eq=False)
class MicroBatch:
    """One part of the batch."""

    leaves: list[Any]
    """Of the model's arguments."""
    target: Any
    share: Amount
    """The weight of its loss in the whole, as far as it is known beforehand."""
    first: int
    """Its first sample in the batch."""
    num_samples: int
    stages: dict[int, BoundStage]
    """The stages of this rank, for its number of samples."""


@dataclass(eq=False)
class StepRun:
    """One step, from its first action to its last.

    Its many fields are the parts of the step, and by stage and micro-batch what is under way between two actions.
    """

    micro_batches: Sequence[MicroBatch]
    link: PipelineLink
    rank_of: Callable[[int], int]
    """The place along the pipeline of each stage."""
    loss_fn: Callable[[Any, Any], torch.Tensor] | None
    """Without one there is no backward."""
    draws: StageDraws
    losses: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    outputs: dict[int, Any] = field(default_factory=dict[int, Any])
    _scale_of: Callable[[torch.Tensor, Any, MicroBatch], Amount] | None = None
    _spans: list[tuple[float, float]] | None = None
    _arrived: dict[tuple[int, int], list[torch.Tensor]] = field(default_factory=dict)
    _gradients: dict[tuple[int, int], list[torch.Tensor | None]] = field(default_factory=dict)
    _works: dict[tuple[str, int, int], list[Transfer | None]] = field(default_factory=lambda: defaultdict(list))
    _held: dict[tuple[int, int], HeldActivations] = field(default_factory=dict)
    _leaving: dict[tuple[str, int, int], list[torch.Tensor]] = field(default_factory=dict)

    def run(
        self,
        actions: Iterable[Action],
        *,
        scale_of: Callable[[torch.Tensor, Any, MicroBatch], Amount] | None = None,
        spans: list[tuple[float, float]] | None = None,
    ) -> None:
        """Run the actions of this rank. Called by: every rank of the pipeline, with the actions of one schedule.

        Args:
            actions: in their order.
            scale_of: returns the factor of a micro-batch's loss, given the loss, the output and the micro-batch; by
                default its share.
            spans: is filled with the start and end of each forward and backward.
        """
        self._scale_of = scale_of
        self._spans = spans
        do: dict[str, Callable[[int, int], None]] = {
            kinds.FORWARD: self._forward,
            kinds.BACKWARD: self._backward,
            kinds.BACKWARD_INPUT: self._backward_input,
            kinds.BACKWARD_WEIGHT: self._backward_weight,
            kinds.SEND_FORWARD: partial(self._send, kinds.SEND_FORWARD, 1),
            kinds.SEND_BACKWARD: partial(self._send, kinds.SEND_BACKWARD, -1),
            kinds.RECEIVE_FORWARD: self._receive_forward,
            kinds.RECEIVE_BACKWARD: self._receive_backward,
        }
        for action in actions:
            try:
                do[action.kind](action.stage, action.micro_batch)
            except Exception as error:
                error.add_note(f"in the {action.kind} of stage {action.stage}, micro-batch {action.micro_batch}")
                raise
        self.link.finish()

    # -- computing ---------------------------------------------------------------------------------

    def _forward(self, stage: int, number: int) -> None:
        micro_batch = self.micro_batches[number]
        bound = micro_batch.stages[stage]
        self.link.wait(self._works.pop((kinds.RECEIVE_FORWARD, stage, number), ()))
        received = self._arrived.pop((stage, number), [])
        first, num = micro_batch.first, micro_batch.num_samples
        with self._timed():
            with self.draws.drawing(bound, micro_batch.leaves, received, first, num) as before_call:
                sent, held = bound.forward(micro_batch.leaves, received, before_call)
            if bound.is_last:
                self._finish_forward(held, micro_batch, number)
        if self.loss_fn is not None:
            self._held[stage, number] = held
        if not bound.is_last:
            self._hand_on(kinds.SEND_FORWARD, stage, number, sent)

    def _finish_forward(self, held: HeldActivations, micro_batch: MicroBatch, number: int) -> None:
        if self.loss_fn is None:
            self.outputs[number] = held.output
            return
        loss = self.loss_fn(held.output, micro_batch.target)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise ConfigurationError(
                "loss_fn must return a scalar tensor.",
                evidence=f"it returned {list(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__}",
                do="return a mean or a sum over the micro-batch",
            )
        scale = micro_batch.share if self._scale_of is None else self._scale_of(loss, held.output, micro_batch)
        if is_zero(scale):
            held.end_forward(None)
            # A mean over nothing is NaN, and so are its gradients: without a loss there are none.
            self.losses.append(loss.detach().new_zeros(()))
            return
        scaled = loss.reshape(()) * scale
        if isinstance(scale, torch.Tensor):
            # The same for a scale on a device: it leaves nothing of a loss and its gradients if it is zero.
            is_nothing = scale == 0
            scaled = scaled.masked_fill(is_nothing, 0.0)
            for leaf in tree_leaves(held.output):
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    leaf.register_hook(partial(_masked, is_nothing))
        held.end_forward(scaled)
        self.losses.append(scaled.detach().clone())

    def _backward(self, stage: int, number: int) -> None:
        gradients = self._arrived_gradients(stage, number)
        held = self._held.pop((stage, number))
        with self._timed():
            found = self._bound(stage, number).backward(held, gradients)
        self._return(stage, number, found)

    def _backward_input(self, stage: int, number: int) -> None:
        gradients = self._arrived_gradients(stage, number)
        with self._timed():
            found = self._bound(stage, number).backward_input(self._held[stage, number], gradients)
        self._return(stage, number, found)

    def _backward_weight(self, stage: int, number: int) -> None:
        with self._timed():
            self._bound(stage, number).backward_weight(self._held.pop((stage, number)))

    def _arrived_gradients(self, stage: int, number: int) -> list[torch.Tensor | None]:
        self.link.wait(self._works.pop((kinds.RECEIVE_BACKWARD, stage, number), ()))
        return self._gradients.pop((stage, number), [])

    def _return(self, stage: int, number: int, found: Sequence[torch.Tensor | None]) -> None:
        """Return the gradients of the received values to the previous stage; zeros if backward computed none."""
        if stage == 0:
            return
        bound = self._bound(stage, number)
        gradients: list[torch.Tensor] = []
        for value, gradient in zip(bound.stage.receives, found, strict=True):
            kind = bound.program.kinds[value]
            if kind.requires_grad:
                place = received_like(kind, self.link.device)
                gradients.append(place.zero_() if gradient is None else _laid_out(gradient.detach(), kind.stride))
        self._hand_on(kinds.SEND_BACKWARD, stage, number, gradients)

    def _bound(self, stage: int, number: int) -> BoundStage:
        return self.micro_batches[number].stages[stage]

    # -- travelling --------------------------------------------------------------------------------

    def _hand_on(self, how: str, stage: int, number: int, tensors: Sequence[torch.Tensor]) -> None:
        """Keep tensors until they are sent, or give them to the neighbouring stage if it is on this rank."""
        neighbour = stage + 1 if how == kinds.SEND_FORWARD else stage - 1
        bound = self._bound(stage, number)
        if self.rank_of(neighbour) != self.rank_of(stage):
            laid_out = list(tensors)
            if how == kinds.SEND_FORWARD:
                laid_out = [
                    _laid_out(tensor.detach(), bound.program.kinds[value].stride)
                    for value, tensor in zip(bound.stage.sends, tensors, strict=True)
                ]
            self._leaving[how, stage, number] = laid_out
        elif how == kinds.SEND_FORWARD:
            self._arrived[neighbour, number] = [tensor.detach() for tensor in tensors]
        else:
            self._gradients[neighbour, number] = self._with_gaps(neighbour, number, tensors)

    def _with_gaps(self, stage: int, number: int, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Return a gradient per value that ``stage`` has sent, ``None`` for values without one."""
        bound = self._bound(stage, number)
        rest = iter(gradients)
        return [next(rest) if bound.program.kinds[value].requires_grad else None for value in bound.stage.sends]

    def _send(self, kind: str, direction: int, stage: int, number: int) -> None:
        for tensor in self._leaving.pop((kind, stage, number)):
            self.link.send(tensor, self.rank_of(stage + direction))

    def _receive_forward(self, stage: int, number: int) -> None:
        bound = self._bound(stage, number)
        places = [received_like(bound.program.kinds[value], self.link.device) for value in bound.stage.receives]
        self._arrived[stage, number] = places
        source = self.rank_of(stage - 1)
        self._works[kinds.RECEIVE_FORWARD, stage, number] = [self.link.receive(place, source) for place in places]

    def _receive_backward(self, stage: int, number: int) -> None:
        bound = self._bound(stage, number)
        needing = [bound.program.kinds[value] for value in bound.stage.sends]
        places = [received_like(kind, self.link.device) for kind in needing if kind.requires_grad]
        self._gradients[stage, number] = self._with_gaps(stage, number, places)
        source = self.rank_of(stage + 1)
        self._works[kinds.RECEIVE_BACKWARD, stage, number] = [self.link.receive(place, source) for place in places]

    @contextmanager
    def _timed(self) -> Generator[None]:
        """Note when the block began and ended, if spans are wanted."""
        if self._spans is None:
            yield
            return
        start = now(self.link.device)
        yield
        self._spans.append((start, now(self.link.device)))


def now(device: torch.device) -> float:
    """Return the time in seconds, once the device has finished its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def _masked(is_nothing: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    return gradient.masked_fill(is_nothing, 0.0)


def _laid_out(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """Return the tensor, or a copy of it, with the strides that the receiver expects."""
    if tensor.stride() == stride:
        return tensor
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A measured step."""

    schedule: str
    num_stages: int
    spans: tuple[ActionSpan, ...]

    @property
    def seconds(self) -> float:
        """From the meeting of the ranks to the end of the last one."""
        return max((span.end for span in self.spans), default=0.0)

    @property
    def num_ranks(self) -> int:
        """How many ranks took part."""
        return 1 + max((span.rank for span in self.spans), default=-1)

    @property
    def bubble(self) -> float:
        """The share of the ranks' time in which they computed nothing."""
        whole = self.seconds * self.num_ranks
        return 1.0 - sum(span.end - span.start for span in self.spans) / whole if whole else 0.0

    @property
    def title(self) -> str:
        """What was measured, in one line."""
        num_micro_batches = 1 + max((span.micro_batch for span in self.spans), default=-1)
        batches = "micro-batch" if num_micro_batches == 1 else "micro-batches"
        return (
            f"{self.schedule}: {self.num_stages} stages on {self.num_ranks} ranks, {num_micro_batches} {batches}, "
            f"{duration(self.seconds)}, bubble {self.bubble:.0%}"
        )

    @property
    def rows(self) -> list[Measured]:
        """The spans as they are drawn and recorded."""
        return [astuple(span) for span in self.spans]


def write_picture(step: MeasuredStep, path: Path) -> None:
    """Write the picture of a step as SVG.

    Raises:
        ConfigurationError: ``path`` does not end in ``.svg``, or its folder does not exist.
    """
    if path.suffix.lower() != ".svg":
        raise ConfigurationError(
            f"draw() writes .svg, not {str(path)!r}.",
            do='pass "schedule.svg"; for a page, rankwise run --report DIR and rankwise show DIR',
        )
    if not path.parent.is_dir():
        raise ConfigurationError(f"The folder {str(path.parent)!r} of draw() does not exist.", do="create it first")
    chart = spans(schedule_rows(step.rows), step.title, duration)
    path.write_text(picture_of(chart, step.title, schedule_legend(step.rows)), encoding="utf-8")
