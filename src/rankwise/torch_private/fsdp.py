# SPDX-License-Identifier: Apache-2.0
"""The groups of parameters within ``fully_shard``, and their whole and sharded forms. Takes long to import."""

from __future__ import annotations

import inspect
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from rankwise.torch_private.autograd import in_backward

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn

__all__ = [
    "AllGather",
    "FSDPParam",
    "FSDPParamGroup",
    "ReduceScatter",
    "call_before_reduction",
    "forget_gradient",
    "groups_of",
    "params_of",
    "reduce_dtype_of",
    "reduce_instead",
    "sharded_of",
    "show_shards_between_passes",
    "whole_of",
]


def groups_of(model: nn.Module) -> list[FSDPParamGroup]:
    """Return the groups of parameters that are gathered and reduced together, each once."""
    found: dict[int, FSDPParamGroup] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:  # noqa: SLF001
                found[id(group)] = group
    return list(found.values())


def call_before_reduction(group: FSDPParamGroup, action: Callable[[FSDPParamGroup], None]) -> None:
    """Run ``action`` each time backward has left the block of a group, before its gradients are reduced."""
    reduce = group.post_backward

    def post_backward(*unused: object) -> None:
        action(group)
        reduce(*unused)

    group.post_backward = post_backward


def show_shards_between_passes(group: FSDPParamGroup) -> None:
    """Have the modules of a group hold its shards between forward and backward, also where torch keeps it gathered.

    Otherwise ``model.parameters()`` gives the whole parameters there, ``model.zero_grad()`` and clipping miss the
    gradients, which the shards hold, and a second forward computes with the values of the first one. What torch has
    gathered for backward stays gathered.
    """
    before_forward, after_forward, before_backward = group.pre_forward, group.post_forward, group.pre_backward
    is_running = False

    def pre_forward(*given: Any, **named: Any) -> Any:
        nonlocal is_running
        if group.is_unsharded and not is_running:
            group.reshard()
        is_running = True
        return before_forward(*given, **named)

    def post_forward(*given: Any, **named: Any) -> Any:
        nonlocal is_running
        is_running = False
        result = after_forward(*given, **named)
        # Within a backward a checkpointed block runs forward again, and its parameters stay in use.
        if group.is_unsharded and not in_backward():
            for one in group.fsdp_params:
                one._setattr_on_modules(one.sharded_param)  # noqa: SLF001
        return result

    def pre_backward(*given: Any, **named: Any) -> None:
        before_backward(*given, **named)
        if group.is_unsharded:
            for one in group.fsdp_params:
                one._setattr_on_modules(one._unsharded_param)  # noqa: SLF001

    group.pre_forward, group.post_forward, group.pre_backward = pre_forward, post_forward, pre_backward


params_of: Callable[[FSDPParamGroup], list[FSDPParam]] = attrgetter("fsdp_params")
"""Return the parameters of a group."""
sharded_of: Callable[[FSDPParam], nn.Parameter] = attrgetter("sharded_param")
"""Return this rank's shard of a parameter, as the optimizer sees it."""
reduce_dtype_of: Callable[[FSDPParam], torch.dtype | None] = attrgetter("reduce_dtype")
"""Return the dtype that gradients are reduced in, or ``None`` for their own."""


def whole_of(one: FSDPParam) -> nn.Parameter | None:
    """Return the unsharded parameter, which receives gradients from autograd; ``None`` before the first forward."""
    return getattr(one, "_unsharded_param", None)


def forget_gradient(one: FSDPParam) -> None:
    """Forget the gradient of the whole parameter."""
    whole = whole_of(one)
    if whole is not None:
        whole.grad = None


def reduce_instead(one: FSDPParam, gradient: torch.Tensor) -> None:
    """Make torch reduce ``gradient`` instead of the last backward's gradient.

    From torch 2.15 on the whole parameter's ``grad`` takes any dtype; before, a wider dtype than the parameter's is
    stored separately.
    """
    if isinstance(inspect.getattr_static(type(one), "unsharded_accumulated_grad", None), property):
        one._unsharded_param.grad = gradient  # noqa: SLF001
    else:
        one._unsharded_param.grad = None  # noqa: SLF001
        one.unsharded_accumulated_grad = gradient
