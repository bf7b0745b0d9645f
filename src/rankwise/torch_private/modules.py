# SPDX-License-Identifier: Apache-2.0
"""The tables of a module, its call, layers with private parts, and an optimizer's step."""

from __future__ import annotations

from collections import OrderedDict
from operator import attrgetter, methodcaller
from typing import TYPE_CHECKING, Any

from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX, Module, _has_any_global_hook

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FunctionType

    import torch
    from torch import nn
    from torch.optim.optimizer import Optimizer
    from torch.utils.hooks import RemovableHandle


EXTRA_STATE = _EXTRA_STATE_KEY_SUFFIX
"""How the key of a module's extra state ends in a ``state_dict``."""

own_parameters: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter("_parameters")
"""Return the table of a module's own parameters, which may be changed. ``parameters()`` takes ten times as long."""
own_buffers: Callable[[nn.Module], dict[str, torch.Tensor | None]] = attrgetter("_buffers")
"""Return the table of a module's own buffers, which may be changed. In torch.jit it has no ``get``."""
own_modules: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter("_modules")
"""Return the table of a module's own modules."""
TABLES = frozenset({"_parameters", "_buffers", "_modules"})
"""The names of these tables among a module's attributes."""


def replace_buffers(module: nn.Module, buffers: dict[str, torch.Tensor | None]) -> None:
    """Give a module another table of buffers: a copied module shares the one of the original."""
    module._buffers = buffers  # noqa: SLF001


# -- calls ---------------------------------------------------------------------------------------------


def wrap_call(module: nn.Module, wrapper: Callable[..., Any]) -> None:
    """Make a call of ``module`` run ``wrapper``, unless it has a wrapper; copies and pickles do not have it."""
    if module._compiled_call_impl is None:  # noqa: SLF001
        module._compiled_call_impl = wrapper  # noqa: SLF001


def call_of_modules() -> FunctionType:
    """Return the function that calls ``forward`` and the hooks of a module, and those of all modules."""
    return Module._call_impl  # noqa: SLF001


def unwrapped_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call ``module`` with its hooks, without the wrapper of :func:`wrap_call`."""
    return module._call_impl(*args, **kwargs)  # noqa: SLF001


def backward_hooks(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the tables of a module's hooks on gradients, which may be changed: after its backward, and before."""
    return module._backward_hooks, module._backward_pre_hooks  # type: ignore[return-value] # noqa: SLF001


def hide_backward_hooks(module: nn.Module) -> None:
    """Give a module tables without hooks on gradients, until its attributes are restored."""
    module._backward_hooks, module._backward_pre_hooks = OrderedDict(), OrderedDict()  # noqa: SLF001


def hook_tables(module: nn.Module) -> tuple[dict[int, Any], ...]:
    """Return the tables of the hooks that see a module's inputs, outputs or their gradients."""
    return module._forward_hooks, module._forward_pre_hooks, *backward_hooks(module)  # noqa: SLF001


def has_hooks_of_all() -> bool:
    """Return whether there are hooks on all modules."""
    return bool(_has_any_global_hook())


def hooks_of(module: nn.Module) -> Iterator[Any]:
    """Yield the hooks that see a module's inputs, outputs or their gradients."""
    for table in hook_tables(module):
        yield from table.values()


# -- layers --------------------------------------------------------------------------------------------


class AnySizeBatchNorm(BatchNorm):
    """BatchNorm over inputs of two dimensions or more."""

    def _check_input_dim(self, input: torch.Tensor) -> None:  # noqa: A002 - torch's own name
        if input.dim() < 2:  # noqa: PLR2004 - batch and channels
            raise ValueError(f"expected an input of at least 2 dimensions, got {input.dim()}")


def check_input_dim(layer: BatchNorm, input: torch.Tensor) -> None:  # noqa: A002 - torch's own name
    """Raise unless a BatchNorm layer accepts the input's number of dimensions."""
    layer._check_input_dim(input)  # noqa: SLF001


def forget_flat_weights(layer: nn.RNNBase) -> None:
    """Drop the weak references to weights, which prevent torch from replacing a parameter's data."""
    layer._flat_weight_refs = []  # noqa: SLF001


OF_WEIGHTS = frozenset({"_flat_weights", "_flat_weight_refs"})
"""The names of a recurrent layer's attributes that hold its weights once more: parametrized ones, of the last call."""


update_flat_weights: Callable[[nn.RNNBase], None] = methodcaller("_init_flat_weights")
"""Make a recurrent layer collect its current weights again."""


# -- state -------------------------------------------------------------------------------------------


def metadata_of(state: dict[Any, Any]) -> object:
    """Return the module versions that ``state_dict()`` stores with the tensors, or ``None``."""
    return getattr(state, "_metadata", None)


def set_metadata(state: dict[Any, Any], metadata: object) -> None:
    """Give a ``state_dict`` the versions of modules that ``load_state_dict`` reads."""
    state._metadata = metadata  # type: ignore[attr-defined] # noqa: SLF001


def mark_step(optimizer: Optimizer, step: Any) -> None:
    """Give ``step``, which replaces the optimizer's, the marks that schedulers look for."""
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        # A scheduler was built before and has marked the step it found.
        step._wrapped_by_lr_sched = True  # noqa: SLF001
    # Schedulers also check that the optimizer has stepped before them, which not every rank knows.
    optimizer._opt_called = True  # type: ignore[attr-defined] # noqa: SLF001


def put_innermost(optimizer: Optimizer, before: RemovableHandle, after: RemovableHandle) -> None:
    """Have two hooks of an optimizer run last before its step, and first after it."""
    pre: OrderedDict[int, Any] = optimizer._optimizer_step_pre_hooks  # type: ignore[assignment] # noqa: SLF001
    post: OrderedDict[int, Any] = optimizer._optimizer_step_post_hooks  # type: ignore[assignment] # noqa: SLF001
    pre.move_to_end(before.id)
    post.move_to_end(after.id, last=False)
