# SPDX-License-Identifier: Apache-2.0
"""The optimizers that step one model: how often since ranks last compared, and with which hyperparameters.

Optimizers are known by torch's global step hook, from the first guarded model until the world is left. Used by guard.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakSet, ref

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from rankwise.replicas.hyperparameters import checksum_of, values_of
from rankwise.torch_private.compiler import uncompiled

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn
    from torch.utils.hooks import RemovableHandle

Group = dict[str, Any]
"""One parameter group in JSON: the optimizer's class, numbers of the model's parameters, values by key."""


class OptimizersOf:
    """The optimizers that hold parameters of one model, as far as they have stepped since ranks last compared."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.number_of = {id(parameter): number for number, parameter in enumerate(parameters)}
        """By the identity of a parameter, which the model keeps alive."""
        self.num_steps = 0
        """How many steps there were since ranks last compared."""
        self._stepped: dict[int, ref[Optimizer]] = {}
        _follow(self)

    def note_step(self, optimizer: Optimizer) -> None:
        """Take in that ``optimizer`` has stepped."""
        self.num_steps += 1
        if id(optimizer) not in self._stepped:
            self._stepped[id(optimizer)] = ref(optimizer)

    def start_over(self) -> None:
        """Forget the steps: ranks have compared."""
        self.num_steps = 0
        self._stepped.clear()

    def checksum(self) -> int:
        """Return a checksum of the hyperparameters as they are now; the order of the optimizers plays no part."""
        return sum(map(checksum_of, self._optimizers()))

    def groups(self) -> list[Group]:
        """Return the parameter groups with parameters of the model, as JSON can carry them."""
        found: list[Group] = []
        for optimizer in self._optimizers():
            for group in optimizer.param_groups:
                numbers = [self.number_of[id(p)] for p in group["params"] if id(p) in self.number_of]
                if numbers:
                    values = values_of(group)
                    found.append({"optimizer": type(optimizer).__name__, "parameters": numbers, "values": values})
        return found

    def _optimizers(self) -> Iterable[Optimizer]:
        # An optimizer that was replaced is collected on one rank earlier than on another, and is not kept for this.
        return [one for reference in self._stepped.values() if (one := reference()) is not None]


_followed: WeakSet[OptimizersOf] = WeakSet()
_models_of: dict[int, tuple[ref[Optimizer], int, list[ref[OptimizersOf]]]] = {}
"""By the identity of an optimizer: itself, how many groups it had, and the models whose parameters it holds."""
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


def _after_step(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
    """Tell the models whose parameters an optimizer holds. Called by torch, after every step."""
    # To be left alone by the compiler takes several times as long as what is done here.
    (_tell_uncompiled if torch.compiler.is_compiling() else _tell)(optimizer)


def _tell(optimizer: Optimizer) -> None:
    # By identity: a dict with weak keys takes several times as long to look into.
    known = _models_of.get(id(optimizer))
    if known is None or known[0]() is not optimizer or known[1] != len(optimizer.param_groups):
        known = _models_of[id(optimizer)] = ref(optimizer), len(optimizer.param_groups), _models_stepped_by(optimizer)
    for reference in known[2]:
        model = reference()
        if model is not None:
            model.note_step(optimizer)


_tell_uncompiled = uncompiled(_tell)


def _models_stepped_by(optimizer: Optimizer) -> list[ref[OptimizersOf]]:
    for number in [number for number, (reference, *_) in _models_of.items() if reference() is None]:
        del _models_of[number]
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return [ref(model) for model in _followed if not held.isdisjoint(model.number_of)]
