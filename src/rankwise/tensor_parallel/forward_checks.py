# SPDX-License-Identifier: Apache-2.0
"""Checks that ranks along ``tp`` call a model alike: a difference would give wrong results and no error.

All meet before every forward; the first forwards compare inputs and random numbers too. Used by tensor_parallel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rankwise.comm.session import current
from rankwise.errors import ConfigurationError, fold_values
from rankwise.replicate.loss.graph import outputs_of
from rankwise.replicate.same_model import SameForward, digest_of_tensors
from rankwise.replicate.split_tensors import refuse_second_derivatives
from rankwise.replicate.strategy_registry import check_no_optimizer_holds, is_registered
from rankwise.torch_private import tree as pytree
from rankwise.torch_private.autograd import in_backward
from rankwise.torch_private.compiler import uncompiled
from rankwise.world.device.accelerator import random_state
from rankwise.world.device.kinds import is_accelerator

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from weakref import ref

    from torch import nn

    from rankwise.comm.backends.protocol import Exchange

CHECKED_FORWARDS = 3
"""So many of the first forwards in training, and in evaluation, compare values."""


class ForwardChecks:
    """The checks of one model, around each forward."""

    def __init__(
        self,
        name: str,
        before: Sequence[ref[nn.Parameter]],
        exchange: Exchange | None,
        prepare: Callable[[nn.Module], None],
    ) -> None:
        self._before = list(before)
        self._exchange = exchange
        self._same = SameForward(exchange, f"tensor parallel {name}")
        self._prepare = prepare
        self._num_left = {True: CHECKED_FORWARDS, False: CHECKED_FORWARDS}
        self._differing: list[tuple[int, list[int]]] = []
        """Random states that differ between ranks: number, and checksums by rank."""
        self._own: list[int] = []
        self._is_averaged = False

    def follow(self, model: nn.Module) -> None:
        """Have every forward of ``model`` checked."""
        model.register_forward_pre_hook(_SplitModelHook(self._before_forward), with_kwargs=True, prepend=True)
        model.register_forward_hook(_SplitModelHook(self._after_forward))

    def _before_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Meet the other ranks. Called by: every rank along ``tp``."""
        self._differing = []
        if in_backward():
            return
        self._same.wait_for_all(model, (args, kwargs))
        self._prepare(model)
        if self._before:
            check_no_optimizer_holds(self._before, "tensor_parallel")
            self._before.clear()
        if not self._is_averaged and model.training and torch.is_grad_enabled():
            _check_averaged(model)
            self._is_averaged = True
        if self._exchange is not None and self._num_left[model.training]:
            self._num_left[model.training] -= 1
            self._compare((args, kwargs), self._exchange)

    def _after_forward(self, _: nn.Module, __: object, output: object) -> None:
        """Raise if the forward drew random numbers that differ between ranks."""
        if not in_backward():
            for reached in outputs_of(output):
                reached.register_hook(lambda _: refuse_second_derivatives("tensor_parallel"))
        differing, self._differing = self._differing, []
        if not differing:
            return
        now = _random_states()
        for number, states in differing:
            if now[number] != self._own[number]:
                raise ConfigurationError(
                    "Ranks that share layers drew different random numbers, for example for dropout masks.",
                    where=f"reported on {current().world}",
                    evidence="checksums of the random states before, by rank along tp:\n"
                    + fold_values(dict(enumerate(states))),
                    do="call torch.manual_seed() with the same seed on ranks that differ along tp only",
                )

    def _compare(self, values: object, exchange: Exchange) -> None:
        tensors = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor) and not leaf.is_meta]
        self._own = _random_states()
        own = torch.tensor([digest_of_tensors(tensors), *self._own])
        inputs, *states = exchange.all_gather(own, what="inputs of a tensor parallel model").unbind(1)
        if len(set(inputs.tolist())) > 1:
            raise ConfigurationError(
                "Ranks that share layers received different inputs.",
                where=f"reported on {current().world}",
                evidence="checksums of the inputs, by rank along tp:\n" + fold_values(dict(enumerate(inputs.tolist()))),
                do="take batches from rankwise.DataLoader, which yields the same to all ranks along tp; use the same "
                "seed for random inputs",
            )
        # Different states are an error only if forward draws numbers, which shows after it has run.
        self._differing = [(number, found) for number, one in enumerate(states) if len(set(found := one.tolist())) > 1]


class _SplitModelHook:
    """A hook of a split model. A copy of the model is split too, and keeps the hook; pickling one is refused."""

    def __init__(self, check: Callable[..., None]) -> None:
        self._check = check

    @uncompiled
    def __call__(self, *args: object) -> None:
        self._check(*args)

    def __deepcopy__(self, memo: object) -> _SplitModelHook:
        return type(self)(self._check)

    def __reduce__(self) -> tuple[Any, ...]:
        raise ConfigurationError(
            "A model that is split by tensor_parallel() cannot be pickled: its layers are distributed over ranks.",
            do="save it with rankwise.save() or rankwise.save_weights()",
        )


def _random_states() -> list[int]:
    """Return checksums of the states of the CPU's random generator, and of this rank's GPU's."""
    device = current().world.device
    states = [torch.get_rng_state()]
    if is_accelerator(device):
        states.append(random_state(device))
    return [digest_of_tensors([state]) for state in states]


def _check_averaged(model: nn.Module) -> None:
    """Raise if copies of the model see different samples, and no strategy averages their gradients."""
    axes = current().axes
    if axes is not None and axes.data_world_size > 1 and not is_registered(model):
        strategy = "shard" if axes.dp_shard > 1 else "replicate"
        raise ConfigurationError(
            "This model is split along tp, but the gradients of its copies are not averaged.",
            evidence=f"the mesh is {axes}",
            do=f"call rankwise.{strategy}(model) after tensor_parallel(), before creating the optimizer",
        )
