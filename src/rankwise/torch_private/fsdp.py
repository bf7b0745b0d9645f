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
    "ShardsOutsideForward",
    "call_before_reduction",
    "forget_gradient",
    "groups_of",
    "params_of",
    "reduce_dtype_of",
    "reduce_instead",
    "sharded_of",
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


class ShardsOutsideForward:
    """Has the modules of a group hold its shards between forward and backward, also where torch keeps it gathered.

    Otherwise ``model.parameters()`` gives the whole parameters there, ``model.zero_grad()`` and clipping miss the
    gradients, which the shards hold, and a second forward computes with the values of the first one. What torch has
    gathered for backward stays gathered, and a module that is called by itself computes with it.
    """

    def __init__(self, group: FSDPParamGroup) -> None:
        self._group = group
        self._torchs = group.pre_forward, group.post_forward, group.pre_backward
        self._depth = 0
        """Forwards of the group that are running, within each other."""
        group.pre_forward, group.post_forward, group.pre_backward = self._forward, self._end_forward, self._backward
        for module in {one._module_info.module for one in group.fsdp_params}.difference(group.modules):  # noqa: SLF001
            module.register_forward_pre_hook(lambda *_: self._show(whole=True))
            module.register_forward_hook(lambda *_: self._show(whole=False))

    def start_over(self) -> None:
        """Take the next forward for the first one. Called when an error has ended forward."""
        self._depth = 0

    def _forward(self, *given: Any, **named: Any) -> Any:
        if self._group.is_unsharded and self._depth == 0:
            self._group.reshard()
        self._depth += 1
        return self._torchs[0](*given, **named)

    def _end_forward(self, *given: Any, **named: Any) -> Any:
        # Torch calls this for the last of several modules only.
        self._depth = 0 if len(self._group.modules) > 1 else self._depth - 1
        result = self._torchs[1](*given, **named)
        self._show(whole=False)
        return result

    def _backward(self, *given: Any, **named: Any) -> None:
        self._torchs[2](*given, **named)
        self._hold(whole=True)

    def _show(self, *, whole: bool) -> None:
        """Have the modules hold a form, but not within forward, nor where backward runs a checkpointed block again."""
        if self._depth == 0 and not in_backward():
            self._hold(whole=whole)

    def _hold(self, *, whole: bool) -> None:
        if self._group.is_unsharded:
            for one in self._group.fsdp_params:
                one._setattr_on_modules(one._unsharded_param if whole else one.sharded_param)  # noqa: SLF001


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
