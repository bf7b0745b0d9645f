# SPDX-License-Identifier: Apache-2.0
"""Raises an error when a model on the CPU is called with inputs on this rank's accelerator, before it trains.

A script may train on the CPU of a machine with accelerators: it calls its model with inputs on the CPU, and there is
nothing to report. Only a model that was on the CPU when its strategy was called has the check.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.errors import ConfigurationError
from rankwise.health.call_site import user_call_site, words
from rankwise.replicate.loss.graph import first_tensor
from rankwise.replicate.own_hooks import OwnHook
from rankwise.replicate.strategy_registry import is_placed
from rankwise.world.device.kinds import is_accelerator, type_of

if TYPE_CHECKING:
    from torch import nn


def check_device_of_inputs(model: nn.Module, device: str, strategy: str) -> None:
    """Have the calls of a model on the CPU check that its inputs are not on ``device``, this rank's accelerator."""
    if not is_accelerator(device) or is_placed(model) or not _is_on_cpu(model):
        return
    site = words(user_call_site())

    def check(model: nn.Module, args: object, kwargs: object) -> None:
        given = first_tensor((args, kwargs))
        if given is not None and given.device.type == type_of(device) and _is_on_cpu(model):
            name = type(model).__name__
            raise ConfigurationError(
                f"{name} is on cpu, but this rank's device is {device}, and so is that of its inputs.",
                evidence=f"the model was on cpu in {strategy}() at {site}",
                do=f"rankwise.{strategy}({name}(...).to(world.device)), before the optimizer\n"
                "or train on the CPU: rankwise.join(device='cpu')",
            )

    model.register_forward_pre_hook(OwnHook(check), with_kwargs=True)


def _is_on_cpu(model: nn.Module) -> bool:
    return all(parameter.device.type == "cpu" for parameter in model.parameters())
