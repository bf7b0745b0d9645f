# SPDX-License-Identifier: Apache-2.0
"""The running backward, the nodes of its graph, the version of a tensor, and hooks on what autograd saves.

Also backward in two parts, and the actions of torch's pipeline schedules: imported, which takes long, when called.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import attrgetter, methodcaller
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn
    from torch.autograd.graph import Node

    Hooks = tuple[Callable[[torch.Tensor], object], Callable[[Any], torch.Tensor]]
    Edge = tuple[Node, int]
    """A node, and the number of its output."""

NO_GRAPH = -1
"""The number of the backward if none is running."""

graph_task: Callable[[], int] = torch._C._current_graph_task_id  # noqa: SLF001
"""Return the number of the backward that is running on this thread, or ``NO_GRAPH``."""

keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph  # type: ignore[attr-defined] # noqa: SLF001
"""Return whether the backward that is running was given ``retain_graph=True`` or ``create_graph=True``."""

# Public since torch 2.15.
run_after_backward: Callable[[Callable[[], None]], None] = (
    getattr(torch.autograd.graph, "queue_callback", None) or torch.autograd.Variable._execution_engine.queue_callback  # type: ignore[attr-defined] # noqa: SLF001
)
"""Run a function when the running backward has finished; functions run in the order they were queued."""

version_of: Callable[[torch.Tensor], int] = attrgetter("_version")
"""Return how many times a tensor was changed in place."""

hooks_of_gradient: Callable[[torch.Tensor], dict[int, Any] | None] = attrgetter("_backward_hooks")
"""Return the table of a tensor's hooks, which may be changed; ``None`` if it never had any."""
hooks_after_accumulation: Callable[[torch.Tensor], dict[int, Any] | None] = attrgetter("_post_accumulate_grad_hooks")
"""The same for hooks that run once its gradient has been added to ``grad``."""

_hooks: Any = torch._C._autograd  # type: ignore[attr-defined] # noqa: SLF001
push_saved_tensors_hooks: Callable[..., None] = _hooks._push_saved_tensors_default_hooks  # noqa: SLF001
"""Enter a pair of hooks, as ``torch.autograd.graph.saved_tensors_hooks`` does."""
pop_saved_tensors_hooks: Callable[[], None] = _hooks._pop_saved_tensors_default_hooks  # noqa: SLF001
"""Leave the innermost pair of hooks."""


def in_backward() -> bool:
    """Return whether backward is running on this thread: a forward is then a recomputation."""
    return graph_task() != NO_GRAPH


def is_accumulated_now(leaf: torch.Tensor) -> bool:
    """Return whether the running backward adds to the ``grad`` of a leaf, which ``torch.autograd.grad`` does not."""
    try:
        return torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(leaf).node)  # type: ignore[attr-defined] # noqa: SLF001
    except RuntimeError:  # torch has no answer for the leaves that autograd.grad returns gradients of
        return False


innermost_saved_tensors_hooks: Callable[[], Hooks | None] = partial(_hooks._top_saved_tensors_default_hooks, False)  # noqa: SLF001
"""Return the pair of hooks that would be called now."""


is_view: Callable[[torch.Tensor], bool] = methodcaller("_is_view")
"""Return whether autograd tracks a tensor as a view of another one."""
metadata_of: Callable[[Node], dict[str, Any]] = attrgetter("metadata")
"""Returns a node's mutable metadata. Public in torch, which declares it as a function."""


_Reader = Callable[["Node"], Any]
_READERS: dict[str, _Reader] = {
    "reduction": attrgetter("_saved_reduction"),
    "total_weight": attrgetter("_saved_total_weight"),
    "dim": attrgetter("_saved_dim"),
    "self_sizes": attrgetter("_saved_self_sym_sizes"),
    "other": attrgetter("_saved_other"),
    "self": attrgetter("_saved_self"),
    "condition": attrgetter("_saved_condition"),
}


_lacking: set[tuple[type, str]] = set()
"""Kinds of nodes of C++, and names under which they save nothing: another lookup would cost an exception."""


def saved(node: Node, name: str) -> Any:
    """Return what a node saved in its forward under a name; ``None`` if it saved nothing."""
    key = type(node), name
    if key in _lacking:
        return None
    try:
        return _READERS[name](node)
    except AttributeError:
        if not is_of_python(node):
            _lacking.add(key)
        return None


def shape_of(edge: Edge) -> tuple[int, ...]:
    """Return the shape of the gradient of a node: that of the value computed in its forward.

    Unlike a saved tensor it is available without calling any hook of saved tensors.
    """
    node, output = edge
    shapes: Any = node._input_metadata  # type: ignore[attr-defined] # noqa: SLF001
    return tuple(shapes[output].shape)


_FUNCTION = "RegisterPostBackwardFunction"
OF_BLOCK = f"{_FUNCTION}Backward"
"""The node by which ``fully_shard`` notices that backward has left a block. It changes nothing."""


def function_of(node: Node) -> type | None:
    """Return the function in Python that a node is the backward of, if it is one."""
    return getattr(node, "_forward_cls", None)


def is_of_python(node: Node) -> bool:
    """Return whether the backward of a node is written in Python: its forward can be anything."""
    return hasattr(node, "_forward_cls") and node.name() != OF_BLOCK


# -- pipelines --------------------------------------------------------------------------------------

BACKWARD_OF_INPUTS = "stage_backward_input() of torch.distributed.pipelining as of that release"
"""A backward in two parts needs this: before torch 2.13 it fails if a stage passes on a value it does not use."""


def forward_action(stage: int, micro_batch: int) -> Any:
    """Return the action that is a forward."""
    from torch.distributed.pipelining.schedules import _Action, _ComputationType  # noqa: PLC0415 - takes long

    return _Action(stage, _ComputationType.FORWARD, micro_batch)


def backward_action(stage: int, micro_batch: int) -> Any:
    """Return the action that is a whole backward."""
    from torch.distributed.pipelining.schedules import _Action, _ComputationType  # noqa: PLC0415 - takes long

    return _Action(stage, _ComputationType.FULL_BACKWARD, micro_batch)


def read_action(action: Any) -> tuple[str, int, int]:
    """Return the kind of an action in torch's letters (F, B, I, W, SEND_F, ...), its stage and its micro-batch."""
    return action.computation_type.value, action.stage_index, action.microbatch_index


def with_sends(
    order: dict[int, list[Any]], *, stage_to_rank: Callable[[int], int], num_stages: int
) -> dict[int, list[Any]]:
    """Return each rank's actions with sends and receives inserted where they are safe."""
    from torch.distributed.pipelining.schedules import _add_send_recv  # noqa: PLC0415 - takes long

    return _add_send_recv(order, stage_to_rank=stage_to_rank, num_stages=num_stages)


def backward_of_inputs(
    roots: list[torch.Tensor],
    gradients: list[torch.Tensor] | None,
    inputs: list[torch.Tensor],
    weights: Iterator[nn.Parameter],
) -> tuple[Sequence[torch.Tensor | None], list[dict[str, Any]]]:
    """Return the gradients of inputs, and what :func:`backward_of_weights` needs."""
    from torch.distributed.pipelining._backward import stage_backward_input  # noqa: PLC0415 - takes long

    return stage_backward_input(roots, gradients, inputs, weights)


def backward_of_weights(weights: Iterator[nn.Parameter], groups: list[dict[str, Any]]) -> None:
    """Add the remaining gradients of weights after :func:`backward_of_inputs`."""
    from torch.distributed.pipelining._backward import stage_backward_weight  # noqa: PLC0415 - takes long

    stage_backward_weight(weights, groups)
