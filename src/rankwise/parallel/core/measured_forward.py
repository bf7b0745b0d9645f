# SPDX-License-Identifier: Apache-2.0
"""Measures the forward passes of a model that a strategy has spread."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rankwise.comm.step_measuring import is_updating
from rankwise.health import step_meter
from rankwise.health.step_record import BACKWARD, EVALUATION, FORWARD, OPTIMIZER, SCRIPT
from rankwise.parallel.core.own_hooks import OwnHook

if TYPE_CHECKING:
    from torch import nn


def measure_forward(model: nn.Module) -> None:
    """Count the time of each forward pass of ``model`` as such, if this rank measures its steps."""
    if step_meter.current() is not None:
        model.register_forward_pre_hook(OwnHook(_before), prepend=True)
        model.register_forward_hook(OwnHook(_after), always_call=True)


def _before(*_: object) -> None:
    part = step_meter.meter.enter(FORWARD if torch.is_grad_enabled() else EVALUATION)
    if part == BACKWARD:
        # A checkpoint that computes its part again: that is backward too.
        step_meter.meter.resume(BACKWARD)


def _after(*_: object) -> None:
    meter = step_meter.meter
    if meter.part != BACKWARD:
        meter.resume(OPTIMIZER if is_updating() else SCRIPT)
