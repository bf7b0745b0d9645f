# SPDX-License-Identifier: Apache-2.0
"""``rankwise run --guard``: ranks of a hand-written script compare their models every few optimizer steps.

Models of DistributedDataParallel, and unwrapped tensors. Posts checksums in the job's store and never waits: the last
rank to post determines whether all agree. If they do not, the ranks post details at the next comparison, and the last
one evaluates them; in the first steps, always. Imported by the worker.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch.distributed as dist

from rankwise.comm.same_state import (
    STORE_READ_SECONDS,
    CheckSchedule,
    Posted,
    checksum_of_shapes,
    first_unlike_setting,
    listed,
    names_in_modules,
    split_by_wrapper,
    unlike_summaries,
)
from rankwise.comm.session import current_or_none
from rankwise.comm.step_hooks import Follower, Phase, follow
from rankwise.errors import ReplicasDiffer, fold_values
from rankwise.launch.report.ranks_alone import OTHER_LIBRARIES, has_gradients
from rankwise.log import warn
from rankwise.store import opening
from rankwise.tensors.checksum import ChecksumOfAll, combined, settings_checksum, settings_of, summary_of
from rankwise.world.environments.process import read_process

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch
    from torch.optim.optimizer import Optimizer

    from rankwise.store.client import Store

    Report = dict[str, Any]
    """The report of one rank: summaries of values and gradients, and the parameter groups' hyperparameters."""

MOST_STEPS = 128
"""How many optimizer steps are between two comparisons, after the first steps."""
NUM_FIRST_STEPS = 64
"""Until which step details are posted in every comparison."""


def watch(world_size: int) -> None:
    """Compare what optimizers of this process step with those of the other ranks of a job of ``world_size``.

    Called by: each of several ranks, before its script runs.
    """
    follow(_Guard(world_size), Phase.WATCH, is_kept=True)


@dataclass(slots=True)
class Stepped:
    """Tensors that an optimizer steps, and that should be equal on a set of ranks."""

    tensors: dict[str, torch.Tensor]
    ranks: list[int]
    """The ranks that hold them too, in torch's default group."""
    is_wrapped: bool
    """Whether DistributedDataParallel keeps them equal; otherwise it is unknown."""
    posted: Posted
    checksum: ChecksumOfAll = field(default_factory=ChecksumOfAll)

    def details(self, optimizer: Optimizer) -> Report:
        """Return summaries of values and gradients, and the hyperparameters, in a form for JSON."""
        gradients = [one.grad for one in self.tensors.values()]
        return {
            "values": [summary_of(one) for one in self.tensors.values()],
            "gradients": [None if one is None or one.is_sparse else summary_of(one) for one in gradients],
            "groups": [settings_of(group) for group in optimizer.param_groups],
        }


class _Guarded:
    """One optimizer: the number of its steps, and its compared tensors."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.schedule = CheckSchedule(0, MOST_STEPS)
        self.parts: list[Stepped] = []


class _Guard(Follower):
    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._pid = os.getpid()
        self._store: Store | None = None
        self._is_lost = False
        # By identity: lookups in a dict with weak keys take several times as long, in every step.
        self._of: dict[int, tuple[ref[Optimizer], _Guarded]] = {}
        self._num_alike: dict[str, int] = {}

    def after_step(self, optimizer: Optimizer) -> None:
        """Check an optimizer after a step."""
        known = self._of.get(id(optimizer))
        if known is None or known[0]() is not optimizer:
            if not has_gradients(optimizer):
                return
            known = self._of[id(optimizer)] = ref(optimizer), _Guarded()
        guarded = known[1]
        guarded.num_steps += 1
        if self._is_lost or not guarded.schedule.is_due(guarded.num_steps):
            return
        # Models of rankwise.replicate() are compared by it; a process that the script forked is not the rank.
        if os.getpid() == self._pid and self._has_group_of_all() and current_or_none() is None:
            try:
                guarded.parts = guarded.parts or list(self._parts_of(optimizer))
                for part in guarded.parts:
                    self._compare(part, optimizer, guarded.num_steps)
            except (OSError, TypeError):
                # The launcher and its store have exited; or tensors have no plain values.
                self._is_lost = True

    def _parts_of(self, optimizer: Optimizer) -> Iterable[Stepped]:
        """Yield the tensors to compare: one entry per DistributedDataParallel, one for the rest."""
        wrapped, bare = split_by_wrapper(p for group in optimizer.param_groups for p in group["params"])
        for module, tensors in wrapped:
            yield self._part(tensors, dist.get_process_group_ranks(module.process_group), is_wrapped=True)
        if bare and not any(name in sys.modules for name in OTHER_LIBRARIES):
            names = [name or f"tensor {number}" for number, name in enumerate(names_in_modules(bare))]
            yield self._part(dict(zip(names, bare, strict=True)), list(range(dist.get_world_size())), is_wrapped=False)

    def _part(self, tensors: dict[str, torch.Tensor], ranks: list[int], *, is_wrapped: bool) -> Stepped:
        alike = f"{checksum_of_shapes(tensors.values()):x}-{'-'.join(map(str, ranks))}"
        self._num_alike[alike] = self._num_alike.get(alike, 0) + 1
        posted = Posted(self._opened().prefixed(f"{alike}/{self._num_alike[alike]}"), dist.get_rank(), ranks)
        return Stepped(tensors, ranks, is_wrapped, posted)

    def _compare(self, part: Stepped, optimizer: Optimizer, num_steps: int) -> None:
        posted = part.posted
        # At first always: ranks that do not wait for one another may be past the step in which details are requested.
        if num_steps < NUM_FIRST_STEPS or posted.store.check("asked"):
            reports = posted.reports(f"{num_steps}/details", part.details(optimizer))
            if reports is not None:
                self._evaluate(reports, part, type(optimizer).__name__, num_steps)
        checksum = combined([part.checksum(list(part.tensors.values())), settings_checksum(optimizer)])
        are_alike = posted.are_alike(f"{num_steps}/checksum", checksum)
        if are_alike is False:
            posted.store.set("asked", "1")
        elif are_alike:
            posted.store.delete("asked")

    def _evaluate(self, reports: Mapping[int, Report], part: Stepped, optimizer: str, num_steps: int) -> None:
        """Raise if DistributedDataParallel should have kept the ranks equal; warn if they may differ on purpose."""
        found = difference_between(reports, part, optimizer, num_steps)
        if found is None:
            return
        has_own_gradients = bool(_unlike(reports, part, "gradients"))
        if part.is_wrapped and not has_own_gradients and not part.posted.store.check("own"):
            raise found
        # Ranks that step alone and are averaged occasionally: even if their gradients happen to agree.
        part.posted.store.set("own", "1")
        if self._opened().add("told", 1) == 1:
            warn(
                f"{found.what} {'; '.join((found.evidence or '').splitlines())}; nothing keeps them equal: {found.do}; "
                "if ranks are meant to differ, remove --guard",
                all_ranks=True,
            )

    def _has_group_of_all(self) -> bool:
        """Return whether the script has opened torch's default group, of all ranks of the job."""
        return dist.is_initialized() and dist.get_world_size() == self._world_size

    def _opened(self) -> Store:
        if self._store is None:
            reading = read_process()
            if reading.address is None or reading.secret is None:
                message = "the variables of rankwise's launcher were removed from this process"
                raise OSError(message)
            opened = opening.connect(*reading.address, STORE_READ_SECONDS, secret=reading.secret.encode())
            self._store = opened.prefixed(f"attempt/{reading.attempt}/guard")
        return self._store


def difference_between(
    reports: Mapping[int, Report], part: Stepped, optimizer: str, num_steps: int
) -> ReplicasDiffer | None:
    """Return the first difference between ranks' reports that is more than rounding; ``None`` if there is none."""
    where = f"after step {num_steps} of {optimizer}"
    setting = first_unlike_setting(report["groups"] for report in reports.values())
    if setting is not None:
        _, key, held = setting
        return ReplicasDiffer(
            f"{key} of {optimizer} is not the same on all ranks {where}.",
            evidence=fold_values(dict(zip(reports, held, strict=True))),
            do="set it from values that are the same on all ranks: give a scheduler the mean of all losses, by "
            "all_reduce",
        )
    unlike = _unlike(reports, part, "values")
    if not unlike:
        return None
    names = list(part.tensors)
    norms = {rank: f"norm {report['values'][unlike[0]][1]:.9g}" for rank, report in reports.items()}
    return ReplicasDiffer(
        f"{'Parameter ' if part.is_wrapped else ''}{names[unlike[0]]} is not the same on all ranks {where}.",
        evidence=f"{fold_values(norms)}\n{len(unlike)} of {len(names)} tensors differ: "
        + listed([names[number] for number in unlike]),
        do="load weights and the optimizer's state on every rank, and average rank-local changes with all_reduce"
        if part.is_wrapped
        else "wrap its module in DistributedDataParallel, or average its gradients with all_reduce",
    )


def _unlike(reports: Mapping[int, Report], part: Stepped, what: str) -> list[int]:
    """Return the numbers of the tensors whose summaries differ by more than rounding."""
    return unlike_summaries((report[what] for report in reports.values()), (one.dtype for one in part.tensors.values()))
