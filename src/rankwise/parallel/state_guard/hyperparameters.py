# SPDX-License-Identifier: Apache-2.0
"""The optimizers that step one model: how often since the last backward, and with which hyperparameters.

Optimizers are known by torch's global step hook, from the first guarded model until the world is left. Used by guard.
"""

from __future__ import annotations

import marshal
import zlib
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from rankwise.torch_private.compiler import uncompiled

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn
    from torch.utils.hooks import RemovableHandle

NOT_COMPARED = {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}
"""Keys of a parameter group that say nothing about what a step computes."""

Group = dict[str, Any]
"""One parameter group in JSON: the optimizer's class, numbers of the model's parameters, values by key."""


class OptimizersOf:
    """The optimizers that hold parameters of one model, as far as they have stepped since the last backward."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.number_of = {id(parameter): number for number, parameter in enumerate(parameters)}
        """By the identity of a parameter, which the model keeps alive."""
        self.num_steps = 0
        """How many steps there were since the last backward."""
        self._stepped: dict[int, ref[Optimizer]] = {}
        _follow(self)

    def note_step(self, optimizer: Optimizer) -> None:
        """Take in that ``optimizer`` has stepped."""
        self.num_steps += 1
        if id(optimizer) not in self._stepped:
            self._stepped[id(optimizer)] = ref(optimizer)

    def start_over(self) -> None:
        """Forget the steps: a backward has ended."""
        self.num_steps = 0
        self._stepped.clear()

    def checksum(self) -> int:
        """Return a checksum of the hyperparameters as they are now; the order of the optimizers plays no part."""
        total = 0
        for optimizer in self._optimizers():
            digest = 0
            for group in optimizer.param_groups:
                values = [value for key, value in group.items() if key not in NOT_COMPARED]
                digest = zlib.crc32(_bytes_of(values), digest)
            total += digest
        return total

    def groups(self) -> list[Group]:
        """Return the parameter groups with parameters of the model, as JSON can carry them."""
        found: list[Group] = []
        for optimizer in self._optimizers():
            for group in optimizer.param_groups:
                numbers = [self.number_of[id(p)] for p in group["params"] if id(p) in self.number_of]
                values = {key: _plain(value, waits=True) for key, value in group.items() if key not in NOT_COMPARED}
                if numbers:
                    found.append({"optimizer": type(optimizer).__name__, "parameters": numbers, "values": values})
        return found

    def _optimizers(self) -> Iterable[Optimizer]:
        # An optimizer that was replaced is collected on one rank earlier than on another, and is not kept for this.
        return [one for reference in self._stepped.values() if (one := reference()) is not None]


_followed: WeakSet[OptimizersOf] = WeakSet()
_models_of: WeakKeyDictionary[Optimizer, tuple[int, list[ref[OptimizersOf]]]] = WeakKeyDictionary()
_hooks: list[RemovableHandle] = []


def _follow(model: OptimizersOf) -> None:
    _followed.add(model)
    _models_of.clear()
    if not _hooks:
        _hooks.append(register_optimizer_step_post_hook(_after_step))


def unfollow() -> None:
    """Follow no optimizer any more. Called when the world is left."""
    while _hooks:
        _hooks.pop().remove()
    _models_of.clear()


@uncompiled
def _after_step(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
    """Tell the models whose parameters an optimizer holds. Called by torch, after every step."""
    known = _models_of.get(optimizer)
    if known is None or known[0] != len(optimizer.param_groups):
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        models = [ref(model) for model in _followed if not held.isdisjoint(model.number_of)]
        known = _models_of[optimizer] = (len(optimizer.param_groups), models)
    for reference in known[1]:
        model = reference()
        if model is not None:
            model.note_step(optimizer)


def _bytes_of(values: list[Any]) -> bytes:
    """Return values as bytes that are the same in every process."""
    try:
        # Of the second version: later ones depend on who else holds a value.
        return marshal.dumps(values, 2)
    except ValueError:  # a tensor among them
        return marshal.dumps([_plain(value, waits=False) for value in values], 2)


def _plain(value: object, *, waits: bool) -> Any:  # noqa: ANN401 - of any kind
    """Return what JSON can carry of a hyperparameter.

    Args:
        value: of a parameter group.
        waits: read a tensor on an accelerator, which takes until the device has come to it.
    """
    if isinstance(value, torch.Tensor):
        is_read = value.numel() == 1 and not value.is_meta and (waits or value.device.type == "cpu")
        return value.item() if is_read else None
    if isinstance(value, list | tuple):
        return [_plain(one, waits=waits) for one in value]
    return value if value is None or isinstance(value, bool | int | float | str) else type(value).__name__
