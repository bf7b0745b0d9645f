# SPDX-License-Identifier: Apache-2.0
"""The running backward, the version of a tensor, and hooks on what autograd saves."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    Hooks = tuple[Callable[[torch.Tensor], object], Callable[[Any], torch.Tensor]]

NO_GRAPH = -1
"""The number of the backward where none is running."""

graph_task: Callable[[], int] = torch._C._current_graph_task_id  # noqa: SLF001
"""Return the number of the backward that is running on this thread, or ``NO_GRAPH``."""

# Public since torch 2.15.
run_after_backward: Callable[[Callable[[], None]], None] = (
    getattr(torch.autograd.graph, "queue_callback", None) or torch.autograd.Variable._execution_engine.queue_callback  # type: ignore[attr-defined] # noqa: SLF001
)
"""Run a function when the running backward has finished; what is queued last runs last."""

version_of: Callable[[torch.Tensor], int] = attrgetter("_version")
"""Return how many times a tensor was changed in place."""

_hooks: Any = torch._C._autograd  # type: ignore[attr-defined] # noqa: SLF001
push_saved_tensors_hooks: Callable[..., None] = _hooks._push_saved_tensors_default_hooks  # noqa: SLF001
"""Enter a pair of hooks, as ``torch.autograd.graph.saved_tensors_hooks`` does."""
pop_saved_tensors_hooks: Callable[[], None] = _hooks._pop_saved_tensors_default_hooks  # noqa: SLF001
"""Leave the innermost pair of hooks."""


def in_backward() -> bool:
    """Return whether backward is running on this thread: a forward is then a recomputation."""
    return graph_task() != NO_GRAPH


def innermost_saved_tensors_hooks() -> Hooks | None:
    """Return the pair of hooks that would be called now."""
    return _hooks._top_saved_tensors_default_hooks(False)  # noqa: SLF001


def is_view(tensor: torch.Tensor) -> bool:
    """Return whether autograd follows a tensor as a view of another one."""
    return tensor._is_view()  # noqa: SLF001
