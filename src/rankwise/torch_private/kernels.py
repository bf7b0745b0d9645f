# SPDX-License-Identifier: Apache-2.0
"""Kernels of torch's operations, called or replaced for a while; the modes through which calls reach them; streams."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import OpOverload as Operator
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode
from torch.utils._python_dispatch import _get_current_dispatch_mode as innermost_dispatch_mode

if TYPE_CHECKING:
    from torch.overrides import TorchFunctionMode


__all__ = [
    "DispatchMode",
    "Kernel",
    "Operator",
    "Replacements",
    "dispatch_key",
    "innermost_dispatch_mode",
    "is_innermost",
    "kernel_of",
    "pop_function_mode",
    "push_function_mode",
    "stream_of",
]

Kernel = Callable[..., Any]
"""The implementation of an operation on one kind of device."""

stream_of = torch._C._accelerator_getStream  # noqa: SLF001
"""Return this thread's current stream of the device with an index. torch's public function takes ten times as long."""

dispatch_key: Callable[[str], str] = torch._C._dispatch_key_for_device  # noqa: SLF001
"""Return torch's dispatch key for a type of device."""


def kernel_of(operation: str, key: str) -> Kernel | None:
    """Return the kernel of an operation of aten, such as ``bernoulli_.float``; ``None`` if it has none for that key."""
    name = f"aten::{operation}"
    if not torch._C._dispatch_has_kernel_for_dispatch_key(name, key):  # noqa: SLF001
        return None
    kernel = torch.library.get_kernel(name, key)
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))  # type: ignore[attr-defined] # noqa: SLF001
    return partial(kernel.call_boxed, keys)


class Replacements:
    """Kernels that replace torch's, until these are restored."""

    def __init__(self) -> None:
        self.library: torch.library.Library | None = torch.library.Library("aten", "IMPL")

    def replace(self, operation: str, key: str, kernel: Kernel) -> None:
        """Compute an operation with another function."""
        if self.library is None:
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about overriding a kernel, which is intended
            self.library.impl(operation, kernel, key)

    def put_back(self) -> None:
        """Restore torch's own kernels."""
        if self.library is not None:
            self.library._destroy()  # noqa: SLF001 - without it, when it is collected
            self.library = None


pop_function_mode = torch._C._pop_torch_function_stack  # noqa: SLF001
"""Pop the innermost TorchFunctionMode, without exiting it."""
push_function_mode = torch._C._push_on_torch_function_stack  # noqa: SLF001
"""Push a TorchFunctionMode back."""


def is_innermost(mode: TorchFunctionMode) -> bool:
    """Return whether a TorchFunctionMode is the one that is called first."""
    count = torch._C._len_torch_function_stack()  # noqa: SLF001
    return count > 0 and torch._C._get_function_stack_at(count - 1) is mode  # noqa: SLF001
