# SPDX-License-Identifier: Apache-2.0
"""What each block of a model costs: its forward and backward, measured. Used by pipeline to balance stages.

Leaves the model as it was: no gradients, the same buffers, the same random numbers afterwards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rankwise.parallel.pipeline.executor import now
from rankwise.parallel.pipeline.program import Program, Ref
from rankwise.parallel.pipeline.undo_forward import PythonRandomness, left_as_it_was
from rankwise.torch_private import tree as pytree
from rankwise.world.device.accelerator import kept_random_states

if TYPE_CHECKING:
    from collections.abc import Sequence
    from operator import attrgetter

    from torch import nn

REPETITIONS = 3


def block_costs(
    program: Program,
    model: nn.Module,
    leaves: Sequence[Any],
    device: torch.device,
    states: dict[int, attrgetter[Any]],
) -> dict[str, float]:
    """Return the seconds of each block, of all its calls, in the order of the first ones.

    Args:
        program: what forward calls.
        model: on its device, with its values.
        leaves: of the arguments that the program was made from.
        device: of the model.
        states: how to get each parameter or buffer that is read between blocks.
    """
    costs: dict[str, float] = {}
    kept = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    env: dict[int, Any] = {number: leaves[index] for number, index in program.inputs.items()}
    env |= program.constants
    env |= {number: get(model) for number, get in states.items()}
    randomness = PythonRandomness()
    last_use = {number: index for index, call in enumerate(program.calls) for number in call.reads}
    try:
        with left_as_it_was(model), kept_random_states(device):
            for index, call in enumerate(program.calls):
                values = [env[leaf.number] if type(leaf) is Ref else leaf for leaf in call.leaves]
                if isinstance(call.target, str):
                    seconds, result = _timed(model.get_submodule(call.target), values, call.spec, device)
                    costs[call.target] = costs.get(call.target, 0.0) + seconds
                else:
                    args, kwargs = pytree.tree_unflatten(values, call.spec)
                    with torch.no_grad():
                        result = call.target(*args, **kwargs)
                parts = pytree.tree_leaves(result)
                env.update((number, parts[leaf]) for leaf, number in call.results)
                # What nobody reads any more would only take memory.
                for number in (*call.reads, *(number for _, number in call.results)):
                    if last_use.get(number, index) <= index:
                        env.pop(number, None)
    finally:
        randomness.put_back()
        with torch.no_grad():
            for buffer, before in kept:
                buffer.copy_(before)
    return costs


def _timed(block: nn.Module, values: list[Any], spec: pytree.TreeSpec, device: torch.device) -> tuple[float, Any]:
    """Return the seconds of one call with its backward, the fastest of some, and what it returned."""
    fastest = float("inf")
    result: Any = None
    for _ in range(REPETITIONS):
        own = [_as_input(value) for value in values]
        args, kwargs = pytree.tree_unflatten([_not_leaf(value) for value in own], spec)
        start = now(device)
        with torch.enable_grad():
            result = block(*args, **kwargs)
            roots = _trained(pytree.tree_leaves(result))
            needing = _trained([*own, *block.parameters()])
            if roots and needing:
                ones = [torch.ones_like(root) for root in roots]
                torch.autograd.grad(roots, needing, ones, allow_unused=True)
        fastest = min(fastest, now(device) - start)
    return fastest, pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, result)


def _trained(values: Sequence[Any]) -> list[torch.Tensor]:
    return [value for value in values if isinstance(value, torch.Tensor) and value.requires_grad]


def _as_input(value: object) -> object:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(value.is_floating_point())


def _not_leaf(value: object) -> object:
    """Return a value that a block may change in place."""
    return value.view_as(value).mul(1) if isinstance(value, torch.Tensor) and value.requires_grad else value
