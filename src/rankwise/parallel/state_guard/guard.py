# SPDX-License-Identifier: Apache-2.0
"""Compares the replicas of one model, step by step: two numbers per rank, sent with what ranks report of the loss.

Every step compares hyperparameters, how often optimizers have stepped, and facts; some also compare the bits of
parameters and of statistics that ranks share. Where the numbers differ, the ranks exchange the details (diagnosis).
Used by replicate, which makes one per model, and by gradient_sync.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rankwise.parallel.state_guard.diagnosis import Parted, diagnose
from rankwise.parallel.state_guard.facts import all_facts, forget_facts
from rankwise.parallel.state_guard.hyperparameters import OptimizersOf, unfollow
from rankwise.replicas.checksum import ChecksumOfAll, are_equal, combined, short
from rankwise.torch_private.dtensor import own_part

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from rankwise.exchange.protocol import Exchange
    from rankwise.session import Session

NUM_NUMBERS = 2
"""How many numbers each rank reports: its checksum and the square of it."""
MOST_STEPS = 16
"""How many steps apart parameters are compared, once a training is under way."""
MOST_PATIENT_STEPS = 1024
"""The same where replicas are known to differ by rounding: to look whether it is more takes a whole exchange."""


class StateGuard:
    """The replicas of one model, from ``replicate`` on."""

    def __init__(
        self,
        model_name: str,
        parameters: Mapping[str, nn.Parameter],
        buffers: Mapping[str, tuple[nn.Module, str]],
        exchange: Exchange,
        session: Session,
        *,
        reads_values: bool = True,
    ) -> None:
        """Begin to follow optimizers.

        Args:
            model_name: for errors.
            parameters: by name; all of the model.
            buffers: those that are the same on all ranks: where each lies, by name.
            exchange: of the ranks that hold replicas.
            session: ends what follows optimizers.
            reads_values: whether the values of parameters are where the parameters are.
        """
        self._model_name = model_name
        self._parameters = dict(parameters) if reads_values else {}
        self._buffers = dict(buffers) if reads_values else {}
        self._exchange = exchange
        self._optimizers = OptimizersOf(list(parameters.values()))
        self._names = list(parameters)
        self._checksum = ChecksumOfAll()
        self._num_steps = 0
        self._next_due = 0
        self._steps_between = MOST_STEPS
        self._facts_from = 0
        self._facts_pause = MOST_STEPS
        self._facts: dict[str, int] = {}
        self._differs = False
        session.on_leave(unfollow)
        session.on_leave(forget_facts)

    def report(self) -> tuple[float, float]:
        """Return what this rank reports in the step under way. Called once per step, before gradients are taken in."""
        numbers: list[int] = []
        if self._num_steps >= self._facts_from:
            self._facts = {fact.name: fact.number for fact in all_facts()}
            numbers = [*self._facts.values(), self._optimizers.num_steps, self._optimizers.checksum()]
        if self._is_due:
            numbers.append(self._checksum(list(self._tensors().values())))
        code = float(short(combined(numbers)))
        return code, code * code

    def take(self, sum_of_checksums: float, sum_of_squares: float) -> None:
        """Take in what all ranks together have reported."""
        self._differs = not are_equal(self._exchange.world_size, sum_of_checksums, sum_of_squares)

    def check(self) -> None:
        """Raise the same error on every rank if the replicas have parted.

        Called by: every rank, at the end of the same backward.

        Raises:
            ReplicasDiffer: names what differs, and what each rank has.
        """
        step, is_due = self._num_steps, self._is_due
        self._num_steps += 1
        if is_due:
            self._next_due = max(step + 1, min(2 * step, step + self._steps_between))
        try:
            if self._differs:
                self._diagnose(step, is_due=is_due)
        finally:
            self._differs = False
            self._optimizers.start_over()

    @property
    def _is_due(self) -> bool:
        return self._num_steps >= self._next_due

    def _diagnose(self, step: int, *, is_due: bool) -> None:
        tensors = self._tensors() if is_due else {}
        parted = Parted(self._model_name, self._names, self._optimizers, self._facts, tensors, num_steps=step + 1)
        if diagnose(parted, self._exchange):
            # Processors that round differently, or a kernel that was chosen by measuring.
            self._steps_between = MOST_PATIENT_STEPS
            self._next_due = max(2 * step, MOST_STEPS) if step < MOST_PATIENT_STEPS else step + MOST_PATIENT_STEPS
        else:
            # Numbers that differ and mean the same, as 1 and 1.0 do.
            self._facts_from = step + self._facts_pause
            self._facts_pause = min(2 * self._facts_pause, MOST_PATIENT_STEPS)

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Return the values that ranks compare, by name; the same on every rank."""
        found = {f"parameter {name}": own_part(parameter) for name, parameter in self._parameters.items()}
        for name, (module, own_name) in self._buffers.items():
            buffer = getattr(module, own_name, None)
            if isinstance(buffer, torch.Tensor):
                found[f"buffer {name}"] = buffer
        return {name: one.detach() for name, one in found.items() if one.layout is torch.strided and not one.is_meta}


def shared_statistics(model: nn.Module, kinds: tuple[type[nn.Module], ...]) -> dict[str, tuple[nn.Module, str]]:
    """Return where the buffers of layers of some kinds lie, by name.

    Args:
        model: the model.
        kinds: layers that take their statistics over all ranks.
    """
    return {
        f"{prefix}.{name}" if prefix else name: (module, name)
        for prefix, module in model.named_modules()
        if isinstance(module, kinds)
        for name, _ in module.named_buffers(recurse=False)
    }
