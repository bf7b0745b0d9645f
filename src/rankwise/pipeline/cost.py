# SPDX-License-Identifier: Apache-2.0
"""The measured forward and backward time of each block of a model. Used by pipeline to balance stages.

Leaves the model unchanged: no gradients, the same buffers, the same random numbers afterwards.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from rankwise.pipeline.executor import now
from rankwise.pipeline.stage_executor import BoundStage
from rankwise.pipeline.stages import called_blocks, cut
from rankwise.replicate.undo_forward import PythonRandomness, left_as_it_was
from rankwise.torch_private import tree as pytree
from rankwise.world.device.accelerator import kept_random_states

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from rankwise.pipeline.program import Program

REPETITIONS = 3


def block_costs(program: Program, model: nn.Module, leaves: Sequence[Any], device: torch.device) -> dict[str, float]:
    """Return the seconds of each block, of all its calls, in the order of the first ones.

    Args:
        program: what forward calls.
        model: on its device, with its values.
        leaves: of the arguments that the program was made from.
        device: of the model.
    """
    costs = dict.fromkeys(called_blocks(program), 0.0)
    blocks = {name: partial(_timed, costs, name, model.get_submodule(name), device) for name in costs}
    whole = BoundStage(cut(program, {}, 1)[0], program, model, blocks, parameters=[], is_last=True)
    kept = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    randomness = PythonRandomness()
    try:
        with left_as_it_was(model), kept_random_states(device), torch.no_grad():
            whole.forward(leaves, ())
    finally:
        randomness.put_back()
        with torch.no_grad():
            for buffer, before in kept:
                buffer.copy_(before)
    return costs


def _timed(
    costs: dict[str, float], name: str, block: nn.Module, device: torch.device, *args: object, **kwargs: object
) -> Any:
    """Call a block with its backward a few times, and add the fastest time to its cost; return its result."""
    fastest = float("inf")
    result: Any = None
    values, spec = pytree.tree_flatten((args, kwargs))
    for _ in range(REPETITIONS):
        own = [_as_input(value) for value in values]
        own_args, own_kwargs = pytree.tree_unflatten([_not_leaf(value) for value in own], spec)
        start = now(device)
        with torch.enable_grad():
            result = block(*own_args, **own_kwargs)
            roots = _trained(pytree.tree_leaves(result))
            needing = _trained([*own, *block.parameters()])
            if roots and needing:
                ones = [torch.ones_like(root) for root in roots]
                torch.autograd.grad(roots, needing, ones, allow_unused=True)
        fastest = min(fastest, now(device) - start)
    costs[name] += fastest
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, result)


def _trained(values: Sequence[Any]) -> list[torch.Tensor]:
    return [value for value in values if isinstance(value, torch.Tensor) and value.requires_grad]


def _as_input(value: object) -> object:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(value.is_floating_point())


def _not_leaf(value: object) -> object:
    """Return a value that a block may change in place."""
    return value.view_as(value).mul(1) if isinstance(value, torch.Tensor) and value.requires_grad else value
