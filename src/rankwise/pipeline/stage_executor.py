# SPDX-License-Identifier: Apache-2.0
"""One stage of a pipeline on one micro-batch: forward, and backward in one piece or in two.

Takes the values of the stage before, and returns those for the next. Sends nothing. Used by executor and cost.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from rankwise.errors import ConfigurationError
from rankwise.pipeline.program import Program, Ref, TensorKind
from rankwise.torch_private import tree as pytree
from rankwise.torch_private.autograd import is_view
from rankwise.torch_private.pipelining import backward_of_inputs, backward_of_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence

    from torch import nn
    from torch.autograd.graph import Node

    from rankwise.pipeline.program import TracedCall
    from rankwise.pipeline.stages import Stage


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
        before_call: Callable[[TracedCall], None] | None = None,
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
                parts = pytree.tree_leaves(result)
                env.update((number, parts[index]) for index, number in call.results)
            for number in drops:
                del env[number]
        sent = [self._checked(number, env[number]) for number in stage.sends]
        held = HeldActivations(needing, {n: v for n, v in zip(stage.sends, sent, strict=True) if v.requires_grad})
        if self.is_last and program.output_spec is not None:
            values = [env[leaf.number] if type(leaf) is Ref else leaf for leaf in program.output]
            held.output = pytree.tree_unflatten(values, program.output_spec)
        return sent, held

    def _checked(self, number: int, value: torch.Tensor) -> torch.Tensor:
        """Raise unless a value has the shape and dtype that the next stage expects."""
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
