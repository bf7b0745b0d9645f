# SPDX-License-Identifier: Apache-2.0
"""Counts the parameters, layers and buffers that modules are given: tells at no cost whether to look again.

torch reports every registration in the process, but no deletion, nor ``ModuleList.insert`` and ``Sequential.insert``.
Used by gradient_sync and buffers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from torch.nn.modules import module as torch_module

from rankwise.torch_private.modules import own_buffers

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(slots=True)
class Registrations:
    """Two counts, to be compared with earlier ones."""

    parameters: int = 0
    """Parameters, and layers, which may hold parameters."""
    buffers: int = 0
    """New buffers, and layers. A buffer that replaces another is not counted."""


@cache
def count_registrations() -> Registrations:
    """Return the counts of this process; the first call starts them."""
    counts = Registrations()

    def count_parameter(*_: object) -> None:
        counts.parameters += 1

    def count_layer(*_: object) -> None:
        counts.parameters += 1
        counts.buffers += 1

    def count_buffer(module: nn.Module, name: str, buffer: torch.Tensor | None) -> None:
        # Not `get`: torch.jit's table is only similar to a dict.
        before = own_buffers(module)
        if buffer is not None and (name not in before or before[name] is None):
            counts.buffers += 1

    torch_module.register_module_parameter_registration_hook(count_parameter)
    torch_module.register_module_module_registration_hook(count_layer)
    torch_module.register_module_buffer_registration_hook(count_buffer)
    return counts
