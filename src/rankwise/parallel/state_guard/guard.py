# SPDX-License-Identifier: Apache-2.0
"""Compares the replicas of one model, step by step: two numbers per rank, sent with what ranks report of the loss.

Some steps compare settings (hyperparameters, how often optimizers have stepped, facts), fewer compare values (the bits
of parameters and of statistics that ranks share). Where numbers differ, the ranks exchange the details (diagnosis).
Used by replicate and shard, which make one per model, and by gradient_sync.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import ref

import torch

from rankwise.parallel.state_guard.diagnosis import Harmless, Parted, diagnose
from rankwise.parallel.state_guard.facts import Fact, Repair, all_facts, forget_facts
from rankwise.parallel.state_guard.hyperparameters import OptimizersOf, unfollow
from rankwise.parallel.state_guard.schedule import Schedule
from rankwise.replicas.checksum import ChecksumOfAll, are_equal, combined, short
from rankwise.torch_private.dtensor import own_part

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from rankwise.exchange.protocol import Exchange
    from rankwise.session import Session

NUM_NUMBERS = 2
"""How many numbers each rank reports: its checksum and the square of it."""
NUM_FIRST_STEPS = 16
"""Steps at the beginning, each of which compares settings."""
SETTINGS_EVERY = 8
VALUES_EVERY = 64
"""How many steps apart settings are compared, and values, once a training is under way."""
PATIENT_EVERY = 1024
"""The same of what is known to differ without meaning: to look whether it is more takes a whole exchange."""


class StateGuard:
    """The replicas of one model, from ``replicate`` on."""

    def __init__(
        self,
        model_name: str,
        parameters: Mapping[str, nn.Parameter],
        buffers: Mapping[str, tuple[ref[nn.Module], str]],
        exchange: Exchange,
        session: Session,
        *,
        reads_values: bool = True,
        reads_facts: bool = True,
    ) -> None:
        """Begin to follow optimizers.

        Args:
            model_name: for errors.
            parameters: by name; all of the model.
            buffers: those that are the same on all ranks: where each lies, by name.
            exchange: of the ranks that hold replicas.
            session: ends what follows optimizers.
            reads_values: whether the values of parameters are where the parameters are.
            reads_facts: whether what else must be the same on all ranks must be so on these.
        """
        self._model_name = model_name
        self._parameters = dict(parameters) if reads_values else {}
        self._buffers = dict(buffers) if reads_values else {}
        self._exchange = exchange
        self._reads_facts = reads_facts
        self._optimizers = OptimizersOf(list(parameters.values()))
        self._names = list(parameters)
        self._checksum = ChecksumOfAll()
        self._num_steps = 0
        self._compared_at = 0
        self._settings = Schedule(NUM_FIRST_STEPS, SETTINGS_EVERY)
        self._values = Schedule(0, VALUES_EVERY)
        self._facts: dict[str, int | None] = {}
        self._sums = (0.0, 0.0)
        session.on_leave(unfollow)
        session.on_leave(forget_facts)

    def report(self) -> tuple[float, float] | None:
        """Return what this rank reports in the step under way, where it compares. Called once per step, in backward."""
        step = self._num_steps
        if step < self._settings.next and step < self._values.next:
            return None
        numbers: list[int] = []
        if step >= self._settings.next:
            self._facts = {fact.name: fact.number for fact in self._all_facts()}
            numbers = [
                *(one or 0 for one in self._facts.values()),
                self._optimizers.num_steps,
                self._optimizers.checksum(),
            ]
        if step >= self._values.next:
            numbers.append(self._checksum(list(self._tensors().values())))
        code = float(short(combined(numbers)))
        return code, code * code

    def take(self, sum_of_checksums: float, sum_of_squares: float) -> None:
        """Take in what all ranks together have reported."""
        self._sums = sum_of_checksums, sum_of_squares

    def check(self) -> None:
        """Raise the same error on every rank if the replicas have parted.

        Called by: every rank, at the end of the same backward.

        Raises:
            ReplicasDiffer: names what differs, and what each rank has.
        """
        for fact in self._all_facts():
            if isinstance(fact.repair, Repair) and fact.repair.is_expected():
                fact.repair.put_right(self._exchange, is_expected=True)
        step = self._num_steps
        self._num_steps += 1
        settings, values = step >= self._settings.next, step >= self._values.next
        if not (settings or values):
            return
        try:
            if not are_equal(self._exchange.world_size, *self._sums):
                self._diagnose(step, values=values)
        finally:
            if settings:
                self._optimizers.start_over()
                self._compared_at = step + 1
                self._settings.advance(step)
            if values:
                self._values.advance(step)

    def _diagnose(self, step: int, *, values: bool) -> None:
        tensors = self._tensors() if values else {}
        steps = (self._compared_at, step + 1)
        parted = Parted(self._model_name, self._names, self._optimizers, self._facts, tensors, steps=steps)
        found = diagnose(parted, self._exchange)
        if found is Harmless.ROUNDING:
            # Processors that round differently, or a kernel that was chosen by measuring.
            self._values.be_patient(PATIENT_EVERY)
        elif found is Harmless.NOTHING:
            # Settings that differ and mean the same, as 1 and 1.0 do.
            self._settings.be_patient(PATIENT_EVERY)

    def _all_facts(self) -> list[Fact]:
        return all_facts() if self._reads_facts else []

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Return the values that ranks compare, by name; the same on every rank."""
        found = {f"parameter {name}": own_part(parameter) for name, parameter in self._parameters.items()}
        for name, (module, own_name) in self._buffers.items():
            buffer = getattr(module(), own_name, None)
            if isinstance(buffer, torch.Tensor):
                found[f"buffer {name}"] = buffer
        return {name: one.detach() for name, one in found.items() if one.layout is torch.strided and not one.is_meta}


def shared_statistics(model: nn.Module, kinds: tuple[type[nn.Module], ...]) -> dict[str, tuple[ref[nn.Module], str]]:
    """Return where the buffers of layers of some kinds lie, by name.

    Args:
        model: the model.
        kinds: layers that take their statistics over all ranks.
    """
    return {
        f"{prefix}.{name}" if prefix else name: (ref(module), name)
        for prefix, module in model.named_modules()
        if isinstance(module, kinds)
        for name, _ in module.named_buffers(recurse=False)
    }
