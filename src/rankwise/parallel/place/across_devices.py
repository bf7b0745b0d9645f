# SPDX-License-Identifier: Apache-2.0
"""Values that meet on different devices: brought to one, with their gradients' way back.

Knows nothing of plans. Imported by place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from rankwise.torch_private import tree as pytree
from rankwise.torch_private.kernels import is_innermost, pop_function_mode, push_function_mode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_COPIES = {torch.Tensor.to, torch.Tensor.copy_, torch.Tensor.type_as, torch.Tensor.set_}
"""Calls that are meant to have tensors of different devices."""

_IN_PLACE = {"__setitem__", *(f"__i{operator}__" for operator in (
    "add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift", "and", "or", "xor"
))}  # fmt: skip
"""What Python calls for ``x[i] = y`` and ``x += y``. Every other call that changes ``x`` ends in ``_``."""


def moved(values: Any, device: torch.device) -> Any:  # noqa: ANN401 - any tree
    """Return a tree with its tensors on ``device``; the same tree where they are there already."""
    leaves, spec = pytree.tree_flatten(values)
    if all(not isinstance(leaf, torch.Tensor) or leaf.device == device for leaf in leaves):
        return values
    there = [leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return pytree.tree_unflatten(there, spec)


class CrossDeviceMode(TorchFunctionMode):
    """Lets the forward of an open module combine values of parts on different devices.

    What such a forward calculates itself (``x + y``, ``torch.cat``) runs where the part ran that was called last;
    what changes a tensor in place, where that tensor is. Inside the parts it does nothing: they have one device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.device = torch.device("cpu")
        self.is_active = False
        self._inside: list[bool] = []

    def begin(self) -> None:
        """Begin to look at calls: the whole model begins to run."""
        self.end()
        self._inside.clear()
        self.is_active = True
        self.__enter__()

    def end(self) -> None:
        """End what :meth:`begin` began, or what an interrupt has left of it."""
        if self.is_active and is_innermost(self):
            self.__exit__(None, None, None)
        self.is_active = False

    def enter_part(self, device: torch.device) -> None:
        """Look away: a part of the model begins to run on its device."""
        self.device = device
        # Out of the way where possible: even looking away takes time in every call.
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
    ) -> Any:  # noqa: ANN401 - whatever the function returns
        kwargs = kwargs or {}
        if self._inside or func in _COPIES:
            return func(*args, **kwargs)
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        devices = {tensor.device for tensor in tensors}
        if len(devices) > 1:
            changed = _changed(func, tensors, kwargs)
            # What is known to be there already is where the next part will mostly want it.
            there = self.device if self.device in devices else tensors[0].device
            there = there if changed is None else changed.device
            return func(*moved(args, there), **moved(kwargs, there))
        return func(*args, **kwargs)


def _changed(func: Callable[..., Any], tensors: list[torch.Tensor], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Return a tensor that a call writes into, or ``None`` where all it returns is new."""
    out = [leaf for leaf in pytree.tree_leaves(kwargs.get("out")) if isinstance(leaf, torch.Tensor)]
    if out:
        return out[0]
    name = getattr(func, "__name__", "")
    is_in_place = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    return tensors[0] if is_in_place else None
