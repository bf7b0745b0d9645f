# SPDX-License-Identifier: Apache-2.0
"""Compares the replicas of one model, step by step: two numbers per rank, sent with the reports of the loss.

Some steps compare settings (hyperparameters, how often optimizers have stepped, facts), fewer compare values (the bits
of parameters and of statistics that ranks share). Where numbers differ, the ranks exchange the details (diagnosis).
A script that takes gradients from ``torch.autograd.grad`` runs no backward: there ranks post summaries to the store,
and the last rank to do so compares them, so that no rank waits for another. Follows the steps of optimizers until the
world is left. Used by replicate and shard, which create one guard per model, and by loss_on_ranks.
"""

from __future__ import annotations

import contextlib
import zlib
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch.optim.optimizer import Optimizer

from rankwise.comm.same_state import CheckSchedule, Posted, unlike_summaries
from rankwise.comm.session import current
from rankwise.comm.step_hooks import Follower, Phase, follow
from rankwise.errors import ReplicasDiffer, fold_values
from rankwise.replicate.state_guard.diagnosis import (
    DivergedReplicas,
    Repair,
    SharedFact,
    check_used,
    diagnose,
    forget_facts,
    plain,
    shared_facts,
)
from rankwise.tensors.checksum import (
    ChecksumOfAll,
    are_equal,
    combined,
    settings_bytes,
    settings_checksum,
    settings_of,
    short,
    summary_of,
)
from rankwise.torch_private.autograd import version_of
from rankwise.torch_private.dtensor import own_part
from rankwise.world.device.streams import is_capturing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import nn

    from rankwise.comm.backends.protocol import Exchange
    from rankwise.comm.session import Session


NUM_NUMBERS = 2
"""How many numbers each rank reports: its checksum and the square of it."""
NUM_FIRST_STEPS = 16
"""The first steps, each of which compares settings, and gradients that no backward has averaged."""
SETTINGS_EVERY = 8
VALUES_EVERY = 64
"""How many steps apart settings, and values or such gradients, are compared after the first steps."""
PATIENT_EVERY = 1024
"""The same for differences that are known to be harmless: finding out costs a whole exchange."""
UNCHANGED_AT = {4, 16, 64}
"""After how many forward passes parameters on a device are compared that seem unchanged."""
_AVERAGE = "g = rankwise.all_reduce(g * len(x)) / rankwise.all_reduce(float(len(x)))"


_numbers = count()
"""Of guards, the same on all ranks, which create them in one order."""


class StateGuard:
    """The replicas of one model, from ``replicate`` on.

    Its many fields are what a report is made of, and what of a reported step is kept until it has been compared.
    """

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
            parameters: all of the model, by name.
            buffers: those that are the same on all ranks: the module and name of each, by its full name.
            exchange: of the ranks that hold replicas.
            session: at whose end optimizers are no longer followed.
            reads_values: whether parameters hold their values, which offloaded and sharded ones do not.
            reads_facts: whether facts must be the same on these ranks.
        """
        self._model_name = model_name
        self._parameters = dict(parameters) if reads_values else {}
        self._buffers = dict(buffers) if reads_values else {}
        self._exchange = exchange
        self._reads_facts = reads_facts
        posted = Posted.of_exchange(exchange, session, f"rankwise/reports/{next(_numbers)}")
        self._unaveraged = WithoutBackward(model_name, self._parameters, posted)
        self.note_forward = self._unaveraged.note_forward
        """Called before each forward pass that may be trained, but for those of further microsteps."""
        self._used = UsedSettings(model_name, posted, session)
        self._optimizers = OptimizersOf(list(parameters.values()), self._used, self._unaveraged.note_step)
        self._names = list(parameters)
        self._checksum = ChecksumOfAll()
        self._num_steps = 0
        self._compared_at = 0
        self._settings = CheckSchedule(NUM_FIRST_STEPS, SETTINGS_EVERY)
        self._values = CheckSchedule(0, VALUES_EVERY)
        self._has_values = False
        """Whether the latest report has a checksum of values."""
        self._facts: list[tuple[SharedFact, int | None]] = []
        self._sums = (0.0, 0.0)
        self._has_ended = False
        """Whether the step is over whose reports have not been compared."""
        self._stepped = dict[str, list[bytes]](), list[Optimizer]()
        """With what optimizers have stepped up to that step since the comparison before, and which."""
        session.on_leave(follow(self._optimizers, Phase.MODEL))
        session.on_leave(forget_facts)

    def report(self) -> tuple[float, float] | None:
        """Return this rank's report, in a step that compares. Called once per step, in backward."""
        step = self._num_steps
        self._has_values = False
        if step < self._settings.next and step < self._values.next and not self._checksum.is_late:
            return None
        numbers: list[int] = []
        if step >= self._settings.next:
            self._facts = [(fact, fact.number()) for fact in list(shared_facts.values()) if self._reads_facts]
            numbers = [
                *(number or 0 for _, number in self._facts),
                self._used.checksum(),
                self._optimizers.checksum(),
            ]
        values = self._values_checksum() if step >= self._values.next or self._checksum.is_late else None
        if values is not None:
            self._has_values = True
            numbers.append(values)
        elif not numbers:
            return None
        code = float(short(combined(numbers)))
        return code, code * code

    def _values_checksum(self) -> int | None:
        """Return the checksum of values; of those on a device in the step after, without a wait for the device."""
        tensors = list(self._tensors().values())
        if any(is_capturing(device) for device in {tensor.device for tensor in tensors}):
            return None
        return self._checksum.now_or_next(tensors)

    def note_sums(self, sum_of_checksums: float, sum_of_squares: float) -> None:
        """Note the sums of all ranks' reports."""
        self._sums = sum_of_checksums, sum_of_squares

    def end_step(self) -> None:
        """Make facts equal that differ as expected; keep what :meth:`check` needs of the step if it is called later.

        Called by: every rank, at the end of the same backward.
        """
        self._has_ended = True
        self._unaveraged.note_backward()
        for fact in list(shared_facts.values()) if self._reads_facts else ():
            if isinstance(fact.repair, Repair) and fact.repair.is_expected():
                fact.repair.apply(self._exchange, is_expected=True)
        settings = self._num_steps >= self._settings.next
        if settings or self._has_values:
            # In late checks there may have been a step since.
            used = {key: list(steps) for key, steps in self._used.held.items()}
            self._stepped = used, self._optimizers.stepped()
        if settings:
            self._optimizers.start_over()
            self._used.start_over(self._num_steps + 1)

    def check(self) -> None:
        """Raise the same error on every rank if the replicas have diverged.

        Called by: every rank, at the end of the same backward or at the beginning of the next.

        Raises:
            ReplicasDiffer: names what differs, and what each rank has.
        """
        if not self._has_ended:
            self.end_step()
        self._has_ended = False
        step = self._num_steps
        self._num_steps += 1
        settings, values = step >= self._settings.next, self._has_values
        if not (settings or values):
            return
        try:
            if not are_equal(self._exchange.world_size, *self._sums):
                self._diagnose(step, values=values)
        finally:
            self._stepped = {}, []
            if settings:
                self._compared_at = step + 1
                self._settings.advance(step)
            if values:
                self._values.advance(step)

    def _diagnose(self, step: int, *, values: bool) -> None:
        tensors = self._tensors() if values else {}
        used, stepped = self._stepped
        groups = self._optimizers.groups(stepped)
        replicas = DivergedReplicas(
            self._model_name, self._names, groups, used, self._facts, tensors, self._compared_at, step + 1
        )
        is_rounding, is_repaired = diagnose(replicas, self._exchange)
        if is_rounding:
            # Processors that round differently, or kernels that torch chose by measuring.
            self._values.be_patient(PATIENT_EVERY)
        elif not is_repaired:
            # Settings that differ and mean the same, as 1 and 1.0 do.
            self._settings.be_patient(PATIENT_EVERY)

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Return the values that ranks compare, by name; the same on every rank."""
        found = {f"parameter {name}": own_part(parameter) for name, parameter in self._parameters.items()}
        for name, (module, own_name) in self._buffers.items():
            buffer = getattr(module(), own_name, None)
            if isinstance(buffer, torch.Tensor):
                found[f"buffer {name}"] = buffer
        return {name: one.detach() for name, one in found.items() if one.layout is torch.strided and not one.is_meta}


OptimizerGroup = dict[str, Any]
"""One parameter group in JSON: the optimizer's class, numbers of the model's parameters, values by key."""


class UsedSettings:
    """The hyperparameters that one model's optimizers have stepped with since ranks last compared. Keeps none alive.

    Guards compare them in some of the steps, so that a value which differed for one step is found in the next
    comparison. What follows the last of these is compared once more before each save and when the world is left,
    through the store: a rank that has skipped a step never gets to a collective.
    """

    def __init__(self, model_name: str, posted: Posted | None, session: Session) -> None:
        """Have ranks compare before saves and when the world is left.

        Called by: every rank with a copy of the model.
        """
        self._model_name = model_name
        self._compared_at = 0
        self._num_posted = 0
        self.held: dict[str, list[bytes]] = {}
        """What each step has used, by the optimizer: replaced when ranks have compared."""
        if posted is not None:
            session.before_save(partial(self._compare_now, posted))
            session.on_leave(partial(self._compare_now, posted))

    def note_step(self, optimizer: Optimizer, first: int) -> None:
        """Note a step of an optimizer, whose first parameter of the model has the number ``first``."""
        self.held.setdefault(f"{type(optimizer).__name__}/{first}", []).append(settings_bytes(optimizer))

    def start_over(self, step: int) -> None:
        """Forget the steps: ranks have compared, in ``step``."""
        self._compared_at = step
        self.held = {}

    def checksum(self) -> int:
        """Return a checksum of all values; the order of the optimizers does not matter."""
        return sum(zlib.crc32(b"".join(steps), zlib.crc32(key.encode())) for key, steps in self.held.items())

    def _compare_now(self, posted: Posted) -> None:
        """Post what this rank has used since the latest comparison in a step.

        Called by: every rank with a copy of the model, before a save or at the end.

        Raises:
            ReplicasDiffer: on the last rank to get here.
        """
        self._num_posted += 1
        own = {"rank": current().world.rank, "used": plain(self.held)}
        # Whatever waits for a lost store reports it.
        with contextlib.suppress(OSError):
            found = posted.reports(f"used/{self._num_posted}", own)
            if found is not None:
                check_used(self._model_name, list(found.values()), since=self._compared_at)


class OptimizersOf(Follower):
    """The optimizers of one model's parameters that have stepped since ranks last compared."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], used: UsedSettings, listener: Callable[[Optimizer], None]
    ) -> None:
        self.number_of = {id(parameter): number for number, parameter in enumerate(parameters)}
        """By the identity of a parameter, which the model keeps alive."""
        self._stepped: dict[int, tuple[ref[Optimizer], int]] = {}
        """Those since ranks last compared, by identity, each with the number of its first parameter of the model."""
        self._used = used
        self._listener = listener

    def concerns(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer holds parameters of the model."""
        return any(id(p) in self.number_of for group in optimizer.param_groups for p in group["params"])

    def after_step(self, optimizer: Optimizer) -> None:
        """Note a step of ``optimizer``."""
        if id(optimizer) not in self._stepped:
            held = (self.number_of.get(id(p)) for group in optimizer.param_groups for p in group["params"])
            first = next(number for number in held if number is not None)
            self._stepped[id(optimizer)] = ref(optimizer), first
        self._used.note_step(optimizer, self._stepped[id(optimizer)][1])
        self._listener(optimizer)

    def start_over(self) -> None:
        """Forget the steps: ranks have compared."""
        self._stepped.clear()

    def checksum(self) -> int:
        """Return a checksum of the current hyperparameters; the order of the optimizers does not matter."""
        return sum(map(settings_checksum, self.stepped()))

    def groups(self, optimizers: Iterable[Optimizer]) -> list[OptimizerGroup]:
        """Return the parameter groups of optimizers with parameters of the model, in JSON-able form."""
        found: list[OptimizerGroup] = []
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                numbers = [self.number_of[id(p)] for p in group["params"] if id(p) in self.number_of]
                if numbers:
                    values = settings_of(group)
                    found.append({"optimizer": type(optimizer).__name__, "parameters": numbers, "values": values})
        return found

    def stepped(self) -> list[Optimizer]:
        """Return the optimizers that have stepped since ranks last compared."""
        # A replaced optimizer is not kept alive; one rank may collect it earlier than another.
        return [one for reference, _ in self._stepped.values() if (one := reference()) is not None]


# -- where no backward compares them: gradients that were assigned, parameters changed by hand ---------


class WithoutBackward:
    """Follows steps and forward passes of one model between which no backward has synchronized."""

    def __init__(self, model_name: str, parameters: Mapping[str, torch.Tensor], posted: Posted | None) -> None:
        """Begin to follow a model.

        Args:
            model_name: for errors.
            parameters: those with whole values, by name.
            posted: what the ranks that hold replicas post.
        """
        self._model_name = model_name
        self._parameters = dict(parameters)
        self._posted = posted
        self._num_backwards = 0
        self._at_step: dict[int, int] = {}
        """How many backwards there were at the latest step of an optimizer, by its identity."""
        self._at_forward = (0, 0)
        """How many backwards there were at the latest forward pass, and which one since then it was."""
        self._is_on_cpu = all(one.device.type == "cpu" for one in parameters.values())
        self._version = 0
        self._num_steps = self._num_forwards = 0
        """Steps, and forward passes, that no backward preceded."""
        self._step_checks = CheckSchedule(NUM_FIRST_STEPS, VALUES_EVERY)
        self._forward_checks = CheckSchedule(NUM_FIRST_STEPS, VALUES_EVERY)

    def note_backward(self) -> None:
        """Note that a backward has synchronized."""
        self._num_backwards += 1

    def note_step(self, optimizer: Optimizer) -> None:
        """Compare the gradients of a step, if no backward has synchronized since the optimizer's latest one.

        Raises:
            ReplicasDiffer: on the last rank to get here.
        """
        before, self._at_step[id(optimizer)] = self._at_step.get(id(optimizer), 0), self._num_backwards
        if before != self._num_backwards or self._posted is None:
            return
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        found = {name: p.grad for name, p in self._parameters.items() if id(p) in held and p.grad is not None}
        if not found:
            return
        self._num_steps += 1
        if not self._step_checks.is_due(self._num_steps - 1):
            return
        self._compare(
            f"gradients/{self._num_steps}",
            found,
            f"{type(optimizer).__name__} has stepped {self._model_name} with gradients that are not the same on "
            "all ranks, because no backward() has averaged them.",
            "the gradient of {} has the norm",
            "call loss.backward() instead of torch.autograd.grad(), and leave rankwise.no_sync() for the last "
            f"microstep; or average each gradient g right after autograd.grad(): {_AVERAGE}",
        )

    def note_forward(self) -> None:
        """Compare parameters, if no backward has synchronized since the latest forward pass that may be trained.

        Raises:
            ReplicasDiffer: on the last rank to get here.
        """
        backwards, since = self._at_forward
        since = since + 1 if backwards == self._num_backwards else 0
        self._at_forward = self._num_backwards, since
        before, self._version = self._version, 0 if self._is_on_cpu else sum(map(version_of, self._parameters.values()))
        # Reading values waits for a device. A change through .data changes no version.
        is_read = self._is_on_cpu or before != self._version or since in UNCHANGED_AT
        if not since or not is_read or self._posted is None:
            return
        self._num_forwards += 1
        if not self._forward_checks.is_due(self._num_forwards - 1):
            return
        self._compare(
            f"parameters/{self._num_backwards}-{since}",
            self._parameters,
            f"Parameter {{}} of {self._model_name} is not the same on all ranks: it was changed without a "
            "backward() that averages gradients.",
            "its norm is",
            "call loss.backward() and use p.grad instead of torch.autograd.grad(); or average each gradient g: "
            f"{_AVERAGE}",
        )

    def _compare(self, key: str, tensors: Mapping[str, torch.Tensor], what: str, held: str, do: str) -> None:
        """Post summaries; on the last rank to post, raise for the first tensor that differs, whose name is ``{}``."""
        plain = {name: own_part(one.detach()) for name, one in tensors.items()}
        plain = {name: one for name, one in plain.items() if one.layout is torch.strided and not one.is_meta}
        if self._posted is None or any(is_capturing(device) for device in {one.device for one in plain.values()}):
            return
        own = {name: summary_of(one) for name, one in plain.items()}
        found = self._posted.reports(key, own)
        if found is None:
            return
        # A rank may have no gradient.
        rows = [[summaries.get(name, (0.0, 0.0)) for name in plain] for summaries in found.values()]
        unlike = unlike_summaries(rows, (one.dtype for one in plain.values()))
        if unlike:
            name = list(plain)[unlike[0]]
            norms = fold_values({rank: row[unlike[0]][1] for rank, row in zip(found, rows, strict=True)})
            where = f"reported on {current().world}"
            raise ReplicasDiffer(what.format(name), where=where, evidence=f"{held.format(name)}\n{norms}", do=do)
