# SPDX-License-Identifier: Apache-2.0
"""What follows a forward pass whose gradients will be made exact. Used by replicate and the parameter servers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rankwise.parallel.loss.nodes import ForwardCall
from rankwise.parallel.loss.reading import mark_output
from rankwise.parallel.own_hooks import OwnHook
from rankwise.parallel.registrations import count_registrations
from rankwise.parallel.trained import samples_of, sizes_of_first, tensors_with_grad
from rankwise.torch_private.autograd import in_backward
from rankwise.torch_private.compiler import uncompiled

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from rankwise.parallel.buffers import BufferSync
    from rankwise.parallel.gradient_sync import GradientSync


class AfterForward(OwnHook):
    """Notes how many samples a forward call stands for, and when backward reaches its output."""

    def __init__(
        self,
        sync: GradientSync,
        weight: Callable[..., float | torch.Tensor] | None,
        buffers: BufferSync | None = None,
    ) -> None:
        self._sync = sync
        self._weight = weight
        self._buffers = buffers
        self._counts = count_registrations()
        self._count_seen = self._counts.parameters

    @uncompiled
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        """Take a forward call in. Called by torch."""
        if not torch.is_grad_enabled():
            return
        sync = self._sync
        if self._count_seen != self._counts.parameters:
            sync.check_followed(module)
            self._count_seen = self._counts.parameters
        if not in_backward():
            if self._buffers is not None and module.training:
                self._buffers.after_forward()
            sync.before_backward()
            sync.note_call(args, kwargs)
        amount = samples_of(self._weight, args, kwargs)
        reached = tensors_with_grad(output)
        mark_output(reached, ForwardCall(sync.number, amount, sizes_of_first(args, kwargs)))
        if amount is None:
            return
        sync.loss.forward_weight = amount
        for one in reached:
            one.register_hook(lambda _: sync.begin(amount))
