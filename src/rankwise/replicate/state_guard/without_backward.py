# SPDX-License-Identifier: Apache-2.0
"""Compares the replicas of one model where no backward does: gradients that were assigned, parameters changed by hand.

Guards compare replicas in backward. A script that takes gradients from ``torch.autograd.grad`` runs none. Ranks post
summaries to the store, and the last rank to do so compares them, so that no rank waits for another. Used by guard.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rankwise.comm.same_state import CheckSchedule, unlike_summaries
from rankwise.comm.session import current
from rankwise.errors import ReplicasDiffer, fold_values
from rankwise.tensors.checksum import summary_of
from rankwise.torch_private.autograd import version_of
from rankwise.torch_private.dtensor import own_part
from rankwise.world.device.streams import is_capturing

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.optim.optimizer import Optimizer

    from rankwise.comm.same_state import Posted

NUM_FIRST = 16
EVERY = 64
"""How often ranks compare after the first times."""
UNCHANGED_AT = {4, 16, 64}
"""After how many forward passes parameters on a device are compared that seem unchanged."""
_AVERAGE = "g = rankwise.all_reduce(g * len(x)) / rankwise.all_reduce(float(len(x)))"


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
        self._step_checks = CheckSchedule(NUM_FIRST, EVERY)
        self._forward_checks = CheckSchedule(NUM_FIRST, EVERY)

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
