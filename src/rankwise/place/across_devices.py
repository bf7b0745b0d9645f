# SPDX-License-Identifier: Apache-2.0
"""Tensors on different devices that are used together: moved to one device, differentiably. Imported by place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from rankwise.torch_private import tree as pytree
from rankwise.torch_private.kernels import is_innermost, pop_function_mode, push_function_mode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_COPIES = {torch.Tensor.to, torch.Tensor.copy_, torch.Tensor.type_as, torch.Tensor.set_}
"""Calls that take tensors of different devices."""

_IN_PLACE = {"__setitem__", *(f"__i{operator}__" for operator in (
    "add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift", "and", "or", "xor"
))}  # fmt: skip
"""What Python calls for ``x[i] = y`` and ``x += y``. Every other call that changes ``x`` ends in ``_``."""


def moved(values: Any, device: torch.device) -> Any:
    """Return a tree with its tensors on ``device``; the same tree if they are there already."""
    leaves, spec = pytree.tree_flatten(values)
    if all(not isinstance(leaf, torch.Tensor) or leaf.device == device for leaf in leaves):
        return values
    there = [leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return pytree.tree_unflatten(there, spec)


class CrossDeviceMode(TorchFunctionMode):
    """Lets the forward of an open module combine tensors of parts on different devices.

    Calls of such a forward (``x + y``, ``torch.cat``) run where the last part ran; calls that change a tensor in place,
    where that tensor is. Inside parts, which have one device, it does nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.device = torch.device("cpu")
        self.is_active = False
        self._inside: list[bool] = []

    def begin(self) -> None:
        """Start looking at calls, when the whole model begins to run."""
        self.end()
        self._inside.clear()
        self.is_active = True
        self.__enter__()

    def end(self) -> None:
        """Stop looking at calls, also after an interrupt."""
        if self.is_active and is_innermost(self):
            self.__exit__(None, None, None)
        self.is_active = False

    def enter_part(self, device: torch.device) -> None:
        """Ignore calls while a part runs on its device."""
        self.device = device
        # Taken off the stack where possible: ignoring a call takes time too.
        is_out = is_innermost(self)
        if is_out:
            pop_function_mode()
        self._inside.append(is_out)

    def leave_part(self) -> None:
        """Look at calls again."""
        if self._inside and self._inside.pop():
            push_function_mode(self)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._inside or func in _COPIES:
            return func(*args, **kwargs)
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        devices = {tensor.device for tensor in tensors}
        if len(devices) > 1:
            changed = _changed(func, tensors, kwargs)
            # The next part mostly runs on the device of the last one.
            there = self.device if self.device in devices else tensors[0].device
            there = there if changed is None else changed.device
            return func(*moved(args, there), **moved(kwargs, there))
        return func(*args, **kwargs)


def _changed(func: Callable[..., Any], tensors: list[torch.Tensor], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Return a tensor that a call writes into, or ``None`` if all it returns is new."""
    out = [leaf for leaf in pytree.tree_leaves(kwargs.get("out")) if isinstance(leaf, torch.Tensor)]
    if out:
        return out[0]
    name = getattr(func, "__name__", "")
    is_in_place = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    return tensors[0] if is_in_place else None
