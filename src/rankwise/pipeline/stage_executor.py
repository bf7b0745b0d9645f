# SPDX-License-Identifier: Apache-2.0
"""One stage of a pipeline on one micro-batch: forward, and backward in one piece or in two.

Takes the values of the stage before, and returns those for the next. Sends nothing. Random numbers are those that one
rank would draw for the whole batch, whatever the cut: each draw has its number in the whole forward pass, each
micro-batch its place in the batch, and all ranks the key of the pass. Used by executor and plan.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rankwise.comm.current_batch import CurrentBatch
from rankwise.errors import ConfigurationError
from rankwise.pipeline.stages import Program, Ref, TensorKind
from rankwise.replicate.device_mesh import exchange_along
from rankwise.replicate.random_numbers.counter import mixed
from rankwise.replicate.random_numbers.model_draws import DrawsOfModel, rows_in_hand
from rankwise.replicate.random_numbers.scope import PlannedDraw, take_key
from rankwise.torch_private.autograd import backward_of_inputs, backward_of_weights, is_view
from rankwise.torch_private.tensors import tree_leaves, tree_unflatten

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence

    from torch.autograd.graph import Node

    from rankwise.comm.session import Session
    from rankwise.pipeline.stages import ProgramCall, Stage
    from rankwise.replicate.random_numbers.scope import DrawScope


@dataclass(eq=False)
class HeldActivations:
    """The tensors of a micro-batch that a stage keeps from forward to backward."""

    leaves: dict[int, torch.Tensor]
    """Received values that need a gradient."""
    outputs: dict[int, torch.Tensor]
    """Values for the next stage that carry a gradient."""
    output: Any = None
    """The model's output, on the last stage."""
    loss: torch.Tensor | None = None
    passed: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])
    """Gradients of values that this stage only passes on."""
    groups: list[dict[str, Any]] | None = None
    roots: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    gradients: list[torch.Tensor] | None = None

    def end_forward(self, loss: torch.Tensor | None) -> None:
        """Release the output, and keep its loss for backward."""
        self.output = None
        self.loss = loss


@dataclass(eq=False)
class BoundStage:
    """A stage with the model whose blocks it calls."""

    stage: Stage
    program: Program
    model: nn.Module
    blocks: Mapping[str, Callable[..., Any]]
    parameters: list[nn.Parameter]
    is_last: bool
    splits_backward: bool | None = None
    """Whether gradients of inputs can be computed without those of weights; determined at the first backward."""
    _states: tuple[tuple[int, Callable[[Any], Any]], ...] = ()

    def __post_init__(self) -> None:
        reads = {number for call in self.stage.calls for number in call.reads} | set(self.program.output_reads())
        names = self.program.states
        self._states = tuple((number, attrgetter(names[number])) for number in sorted(reads) if number in names)

    def forward(
        self,
        leaves: Sequence[Any],
        received: Sequence[torch.Tensor],
        before_call: Callable[[ProgramCall], None] | None = None,
    ) -> tuple[list[torch.Tensor], HeldActivations]:
        """Return the values for the next stage, and those that backward needs.

        Args:
            leaves: of the model's arguments for this micro-batch.
            received: from the stage before.
            before_call: called with each call before it is made.
        """
        stage, program = self.stage, self.program
        env: dict[int, Any] = {number: leaves[index] for number, index in program.inputs.items()}
        env |= program.constants
        env |= {number: get(self.model) for number, get in self._states}
        needing: dict[int, torch.Tensor] = {}
        for number, value in zip(stage.receives, received, strict=True):
            if program.kinds[number].requires_grad and torch.is_grad_enabled():
                needing[number] = value.requires_grad_()
            # A value changed in place must not be a leaf, nor memory that the previous stage on this rank still needs.
            env[number] = value.clone() if number in stage.changed else value
        for call, drops in zip(stage.calls, stage.drops, strict=True):
            if before_call is not None:
                before_call(call)
            args, kwargs = call.arguments(env)
            run = self.blocks[call.target] if isinstance(call.target, str) else call.target
            if call.in_grad_mode:
                result = run(*args, **kwargs)
            else:
                with torch.no_grad():
                    result = run(*args, **kwargs)
            if call.is_whole:
                env[call.results[0][1]] = result
            elif call.results:
                parts = tree_leaves(result)
                env.update((number, parts[index]) for index, number in call.results)
            for number in drops:
                del env[number]
        sent = [self._checked(number, env[number]) for number in stage.sends]
        held = HeldActivations(needing, {n: v for n, v in zip(stage.sends, sent, strict=True) if v.requires_grad})
        if self.is_last and program.output_spec is not None:
            values = [env[leaf.number] if type(leaf) is Ref else leaf for leaf in program.output]
            held.output = tree_unflatten(values, program.output_spec)
        return sent, held

    def _checked(self, number: int, value: torch.Tensor) -> torch.Tensor:
        kind = self.program.kinds[number]
        if tuple(value.shape) != kind.shape or value.dtype != kind.dtype:
            raise ConfigurationError(
                f"Stage {self.stage.number} produced a tensor of a different shape or dtype than the next stage "
                "expects.",
                evidence=f"it is {value.dtype}{list(value.shape)}, expected was {kind.dtype}{list(kind.shape)}",
                do="make shapes between blocks depend on the shapes of the inputs only",
            )
        if value.requires_grad != (kind.requires_grad and torch.is_grad_enabled()):
            raise ConfigurationError(
                f"Whether a tensor that stage {self.stage.number} sends needs a gradient has changed.",
                do="set parameter.requires_grad_() before the step",
            )
        return value

    # -- backward ----------------------------------------------------------------------------------

    def backward(self, held: HeldActivations, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Add to the gradients of the parameters; return those of the received values.

        ``gradients`` are those of the sent values, in their order.
        """
        self._gather_roots(held, gradients)
        return self._whole_backward(held)

    def backward_input(
        self, held: HeldActivations, gradients: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Return the gradients of the received values; :meth:`backward_weight` may add those of the parameters."""
        self._gather_roots(held, gradients)
        if not held.leaves:
            return [None] * len(self.stage.receives)
        if held.roots and self.splits_backward is None:
            self.splits_backward = all(
                _reaches(root, held.leaves.values()) for root in held.roots
            ) and not _uses_one_twice(held.roots, self.parameters)
        if held.roots and not self.splits_backward:
            return self._whole_backward(held)
        leaves = list(held.leaves.values())
        if held.roots:
            # torch detaches them in place, which fails for views and for a root that another one is computed from.
            are_several = len(held.roots) > 1
            roots = [root.clone() if are_several or is_view(root) else root for root in held.roots]
            found, held.groups = backward_of_inputs(roots, held.gradients, leaves, iter(self.parameters))
        else:
            found, held.groups = (None,) * len(leaves), []
        held.roots, held.gradients = [], None
        return self._of_received(held, dict(zip(held.leaves, found, strict=True)))

    def backward_weight(self, held: HeldActivations) -> None:
        """Add the gradients of the parameters that :meth:`backward_input` has not added."""
        if held.groups is not None:
            backward_of_weights(iter(self.parameters), held.groups)
        elif not held.leaves:
            self._whole_backward(held)

    def _gather_roots(self, held: HeldActivations, gradients: Sequence[torch.Tensor | None]) -> None:
        if held.loss is not None:
            held.roots, held.gradients = [held.loss], None
            return
        held.gradients = []
        for number, gradient in zip(self.stage.sends, gradients, strict=True):
            output = held.outputs.get(number)
            if output is None or gradient is None:
                continue
            if held.leaves.get(number) is output:
                held.passed[number] = gradient
            else:
                held.roots.append(output)
                held.gradients.append(gradient)

    def _whole_backward(self, held: HeldActivations) -> list[torch.Tensor | None]:
        if held.roots:
            torch.autograd.backward(held.roots, held.gradients)
        held.roots, held.gradients = [], None
        return self._of_received(held, {number: leaf.grad for number, leaf in held.leaves.items()})

    def _of_received(self, held: HeldActivations, found: dict[int, torch.Tensor | None]) -> list[torch.Tensor | None]:
        for number, gradient in held.passed.items():
            own = found[number]
            found[number] = gradient if own is None else own + gradient
        return [found.get(number) for number in self.stage.receives]


def received_like(kind: TensorKind, device: torch.device) -> torch.Tensor:
    """Return uninitialized memory for a value of this kind."""
    return torch.empty_strided(kind.shape, kind.stride, dtype=kind.dtype, device=device)


def _nodes_of(leaves: Iterable[torch.Tensor]) -> set[Node | None]:
    """Return the nodes of a graph in which gradients of leaves accumulate."""
    views = [leaf.view_as(leaf).grad_fn for leaf in leaves]
    return {node.next_functions[0][0] for node in views if node is not None}


def _edges(roots: Iterable[torch.Tensor]) -> Generator[Node]:
    """Yield the node at the end of every edge of the graph of ``roots``, once per edge."""
    seen: set[Node] = set()
    waiting = [root.grad_fn for root in roots]
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        yield node
        if node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]


def _reaches(root: torch.Tensor, leaves: Collection[torch.Tensor]) -> bool:
    """Return whether a tensor was computed from one of ``leaves``.

    torch's backward in two halves finds parameters on the paths from the inputs to each output; it would miss those of
    an output that does not depend on an input.
    """
    targets = _nodes_of(leaves)
    return any(root is leaf for leaf in leaves) or any(node in targets for node in _edges([root]))


def _uses_one_twice(roots: Sequence[torch.Tensor], parameters: Sequence[nn.Parameter]) -> bool:
    """Return whether a parameter is used in two places, of which torch's backward in two halves sees one."""
    targets = _nodes_of(parameters)
    return any(count > 1 for count in Counter(node for node in _edges(roots) if node in targets).values())


_ELSEWHERE = PlannedDraw("", 0, None, ())
"""Stands for a draw of another stage."""


class StageDraws:
    """The draws of one rank's stages."""

    def __init__(self, session: Session, model: nn.Module) -> None:
        """Replace torch's random operations. Called by: every rank of the world."""
        self._session = session
        self._model = model
        self._along = exchange_along("pp", "dp_replicate", "tp")
        self._copy = 0 if session.axes is None else session.axes.data_rank(session.world.rank)
        self._of_stage: dict[int, tuple[_Called, DrawsOfModel]] = {}
        self._num_copies = 1 if session.axes is None else session.axes.data_world_size
        self._rows = CurrentBatch(0, 0, 0, 0, 0, 0)
        self._key = 0
        DrawsOfModel(session, "counter", type(model).__name__)

    def begin(self, leaves: Sequence[Any], samples: int) -> None:
        """Begin a forward pass of a batch in which numbers are drawn. Called by: every rank."""
        key = torch.tensor([take_key(None)])
        if self._along is not None:
            # Of one rank, since a loss_fn or a script that draws on one rank only moves its generator.
            key = self._along.broadcast(key, 0, what="key of the random numbers of a step")
        self._key = int(key)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()]
        rows = rows_in_hand(list(self._session.batches.in_use.values()), tensors)
        if rows is None or rows.num != samples:
            rows = CurrentBatch(0, 0, 0, samples, samples, 0)
            if self._num_copies > 1:
                self._key ^= mixed(self._copy)
        self._rows = rows

    @contextmanager
    def drawing(
        self, bound: BoundStage, leaves: Sequence[Any], received: Sequence[torch.Tensor], first: int, num: int
    ) -> Generator[Callable[[ProgramCall], None] | None]:
        """Draw for ``num`` samples of the batch, from ``first`` on, in the block.

        Yields:
            A function to call before each call of the stage; ``None`` if the model draws nothing.
        """
        program = bound.program
        if not program.num_draws:
            yield None
            return
        module, draws = self._of(bound)
        rows = replace(self._rows, num=num, start=self._rows.start + first)
        given = [one for one in (*leaves, *received) if isinstance(one, torch.Tensor) and one.dim()]
        before = torch.get_rng_state() if program.has_draws_apart else None
        scope = draws.begin(module, given, rows, program.draws, self._key)
        try:
            yield lambda call: self._skip(scope, call, None if before is None else rows.start)
        finally:
            draws.after(module)
            if before is not None:
                torch.set_rng_state(before)

    def _skip(self, scope: DrawScope, call: ProgramCall, start: int | None) -> None:
        """Leave out the draws of other stages before a call."""
        scope.made.extend([_ELSEWHERE] * (call.first_draw - len(scope.made)))
        if scope.part is not None:
            scope.made_splits.extend([None] * (call.first_draw - len(scope.made_splits)))
        if start is not None:
            # A draw that backward repeats takes its key from the generator: one of this call and these samples.
            torch.default_generator.manual_seed((self._key ^ mixed(call.first_draw) ^ mixed(~start)) & (2**63 - 1))

    def _of(self, bound: BoundStage) -> tuple[_Called, DrawsOfModel]:
        number = bound.stage.number
        if number not in self._of_stage:
            names: Mapping[str, None] = dict.fromkeys(
                call.target for call in bound.stage.calls if isinstance(call.target, str)
            )
            module = _Called([self._model.get_submodule(name) for name in names])
            self._of_stage[number] = module, DrawsOfModel(self._session, "counter", type(self._model).__name__)
        module, draws = self._of_stage[number]
        module.take_mode(self._model)
        return module, draws


class _Called(nn.ModuleList):
    def take_mode(self, model: nn.Module) -> None:
        """Be in training as ``model`` is; each module inside has a mode of its own."""
        self.training = model.training
