# SPDX-License-Identifier: Apache-2.0
"""Modes that see each call of torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch._ops import OpOverload as Operator
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode

if TYPE_CHECKING:
    from torch.overrides import TorchFunctionMode

__all__ = ["DispatchMode", "Operator", "is_innermost", "pop_function_mode", "push_function_mode"]

pop_function_mode = torch._C._pop_torch_function_stack  # noqa: SLF001
"""Take the innermost TorchFunctionMode out of the way, without leaving it."""
push_function_mode = torch._C._push_on_torch_function_stack  # noqa: SLF001
"""Put a TorchFunctionMode back."""


def is_innermost(mode: TorchFunctionMode) -> bool:
    """Return whether a TorchFunctionMode is the one that is called first."""
    count = torch._C._len_torch_function_stack()  # noqa: SLF001
    return count > 0 and torch._C._get_function_stack_at(count - 1) is mode  # noqa: SLF001
