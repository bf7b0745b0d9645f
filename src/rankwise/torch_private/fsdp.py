# SPDX-License-Identifier: Apache-2.0
"""The groups of parameters within ``fully_shard``, and their whole and sharded forms. Takes long to import."""

from __future__ import annotations

import inspect
from operator import attrgetter
from typing import TYPE_CHECKING, Any
from weakref import ref

from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import torch
    from torch import nn

__all__ = [
    "AllGather",
    "FSDPParam",
    "FSDPParamGroup",
    "ReduceScatter",
    "call_around_forward",
    "call_before_reduction",
    "forget_gradient",
    "free_gathered",
    "give_instead",
    "groups_of",
    "params_of",
    "reduce_dtype_of",
    "reduce_instead",
    "sharded_of",
    "shards_of_gathered",
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


def call_around_forward(
    group: FSDPParamGroup, before: Callable[[nn.Module], None], after: Callable[[nn.Module], None]
) -> None:
    """Run actions with a module of a group each time its forward begins, and when the one that ends last has ended."""
    begin, end = group.pre_forward, group.post_forward

    def pre_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        before(module)
        return begin(module, *args, **kwargs)

    def post_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        after(module)
        return end(module, *args, **kwargs)

    group.pre_forward, group.post_forward = pre_forward, post_forward


def free_gathered(group: FSDPParamGroup) -> None:
    """Have the modules of a group hold their shards, if torch has kept the whole parameters."""
    if group.is_unsharded:
        group.reshard()


def shards_of_gathered(group: FSDPParamGroup) -> dict[int, nn.Parameter]:
    """Return the shard of each whole parameter that the modules of a group hold now, by the id of the whole one."""
    if not group.is_unsharded:
        return {}
    return {id(one._unsharded_param): one.sharded_param for one in group.fsdp_params}  # noqa: SLF001


def give_instead(model: nn.Module, instead: Callable[[], Mapping[int, nn.Parameter]]) -> None:
    """Have ``named_parameters`` of a model, and what is built on it, give other parameters, by the id of its own."""
    reference = ref(model)

    def named_parameters(*args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        own = reference()
        if own is not None:
            others = instead()
            for name, parameter in type(own).named_parameters(own, *args, **kwargs):
                yield name, others.get(id(parameter), parameter)

    model.named_parameters = named_parameters  # type: ignore[method-assign]


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
