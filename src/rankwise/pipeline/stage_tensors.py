# SPDX-License-Identifier: Apache-2.0
"""The tensors of a model on one rank of a pipeline: those of its own stages, and meta tensors for all others.

Names, order and tied weights do not change. Used by pipeline; plan decides which rank holds which stages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rankwise.errors import ConfigurationError
from rankwise.pipeline.traced import tensor_places
from rankwise.replicate.from_meta import fill, is_as_filled
from rankwise.torch_private.autograd import version_of
from rankwise.torch_private.dtensor import own_part, placed_like

if TYPE_CHECKING:
    from rankwise.pipeline.plan import StagePlan

META = torch.device("meta")


class RefuseForward:
    """A hook before the forward of a model whose parameters are on several ranks."""

    def __call__(self, module: nn.Module, _: object) -> None:
        """Raise before forward runs."""
        raise ConfigurationError(
            f"This {type(module).__name__} is divided into stages: no rank can run all of it.",
            do="call the step that rankwise.pipeline() returned, or its predict()",
        )


def hold_own_stages(plan: StagePlan, place: int) -> list[tuple[str, torch.Tensor, int]]:
    """Keep only the stages of the rank at ``place``, on its device.

    Returns:
        Tensors that were on the meta device and must be filled: name, tensor, version.
    """
    model = plan.model
    new: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    empty: list[tuple[str, torch.Tensor, int]] = []
    for name, table, key, tensor in list(tensor_places(model)):
        is_own = plan.holds(name, place)
        part = own_part(tensor)
        if part.device == (plan.device if is_own else META):
            continue
        if id(tensor) not in new:
            new[id(tensor)] = tensor, _on(tensor, plan.device if is_own else META)
            if is_own and part.is_meta:
                found = new[id(tensor)][1]
                empty.append((name, found, version_of(own_part(found))))
        table[key] = new[id(tensor)][1]
    if plan.num_ranks > 1:
        model.register_forward_pre_hook(RefuseForward())
        model.register_load_state_dict_pre_hook(_leave_others)
    return empty


def find_unfilled(model: nn.Module, empty: list[tuple[str, torch.Tensor, int]]) -> str | None:
    """Return the name of a tensor that has not been written to since, if there is one."""
    now = {name: tensor for name, _, _, tensor in tensor_places(model)}
    for name, tensor, version in empty:
        part = own_part(tensor)
        if now.get(name) is tensor and version_of(part) == version and is_as_filled(part):
            return name
    return None


def _on(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on another device; one from the meta device is filled so that it cannot pass for loaded."""
    part = own_part(tensor).detach()
    if device.type == "meta":
        part = torch.empty_like(part, device="meta")
    elif part.is_meta:
        part = torch.empty_like(part, device=device)
        fill(part)
    else:
        part = part.to(device)
    if own_part(tensor) is not tensor:
        part = placed_like(tensor, part)
    return nn.Parameter(part, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else part


def _leave_others(model: nn.Module, state: dict[str, Any], prefix: str, *_given: object) -> None:
    """Have ``load_state_dict`` skip the tensors of other ranks: torch would warn of each."""
    for name, _table, _key, tensor in tensor_places(model):
        given = state.get(prefix + name)
        if own_part(tensor).is_meta and isinstance(given, torch.Tensor) and given.shape == tensor.shape:
            state[prefix + name] = tensor
