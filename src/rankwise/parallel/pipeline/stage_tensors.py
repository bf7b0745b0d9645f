# SPDX-License-Identifier: Apache-2.0
"""What one rank of a pipeline holds of the model: the tensors of its stages, and meta tensors for all others.

Names, order and tied weights stay as they are. Used by pipeline; plan decides which rank holds which stages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from rankwise.errors import ConfigurationError
from rankwise.parallel.core.from_meta import fill, is_as_filled
from rankwise.torch_private.autograd import version_of
from rankwise.torch_private.dtensor import own_part, placed_like
from rankwise.torch_private.modules import own_buffers, own_parameters

if TYPE_CHECKING:
    from collections.abc import Generator

    from rankwise.parallel.pipeline.plan import StagePlan

META = torch.device("meta")


class RefuseForward:
    """Stands before the forward of a model whose parameters are on several ranks."""

    def __call__(self, module: nn.Module, _: object) -> None:
        """Raise, before forward runs."""
        raise ConfigurationError(
            f"This {type(module).__name__} is divided into stages: no rank can run all of it.",
            do="call the step that rankwise.pipeline() returned, or its predict()",
        )


def hold_own_stages(plan: StagePlan, place: int) -> list[tuple[str, torch.Tensor, int]]:
    """Have the rank at ``place`` hold its stages on its device, and nothing else.

    Returns:
        What was on the meta device and is to be filled, with its version: name, tensor, version.
    """
    model = plan.model
    new: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    empty: list[tuple[str, torch.Tensor, int]] = []
    for name, table, key, tensor in list(_entries(model)):
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
    """Return the name of a tensor that nothing has been written to since, if there is one."""
    now = {name: tensor for name, _, _, tensor in _entries(model)}
    for name, tensor, version in empty:
        part = own_part(tensor)
        if now.get(name) is tensor and version_of(part) == version and is_as_filled(part):
            return name
    return None


def _entries(model: nn.Module) -> Generator[tuple[str, dict[str, Any], str, torch.Tensor]]:
    for path, module in model.named_modules():
        tables = (own_parameters(module), own_buffers(module))
        for table in cast("tuple[dict[str, Any], ...]", tables):
            for key, tensor in table.items():
                if tensor is not None:
                    yield f"{path}.{key}" if path else key, table, key, tensor


def _on(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on another device; from the meta device so that it cannot pass for loaded."""
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
    """Have ``load_state_dict`` pass over what other ranks hold: torch would warn of each."""
    for name, _table, _key, tensor in _entries(model):
        given = state.get(prefix + name)
        if own_part(tensor).is_meta and isinstance(given, torch.Tensor) and given.shape == tensor.shape:
            state[prefix + name] = tensor
