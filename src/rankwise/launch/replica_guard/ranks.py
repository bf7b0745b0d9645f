# SPDX-License-Identifier: Apache-2.0
"""``rankwise run --guard``: ranks of a hand-written script compare their models every few optimizer steps.

Posts checksums in the job's store and never waits: the last rank to post determines whether all agree. If they do
not, the ranks post details at the next comparison, and the last one evaluates them; in the first steps, always.
Imported by the worker.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING
from weakref import ref

import torch.distributed as dist
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from rankwise.comm.session import current_or_none
from rankwise.launch.replica_guard.difference import Report, Stepped, difference_between, stepped_by
from rankwise.launch.report.unjoined import OTHER_LIBRARIES, has_gradients
from rankwise.log import warn
from rankwise.store import opening
from rankwise.tensors.checksum import are_equal, combined, settings_checksum, short
from rankwise.torch_private.compiler import uncompiled_hook
from rankwise.world.environments.process import read_process

if TYPE_CHECKING:
    from rankwise.store.values import Store

MOST_STEPS = 128
"""How many optimizer steps are between two comparisons, after the first steps."""
NUM_FIRST_STEPS = 64
"""Until which step details are posted in every comparison."""
ANSWER_SECONDS = 10.0
"""How long the store may take to connect, and to return a key that is set."""


def watch(world_size: int) -> None:
    """Compare what optimizers of this process step with those of the other ranks of a job of ``world_size``.

    Called by: each of several ranks, before its script runs.
    """
    register_optimizer_step_post_hook(_Guard(world_size).after_step)


class _Guarded:
    """One optimizer: the number of its steps, and its compared tensors."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.next_due = 1
        self.parts: list[tuple[str, Stepped]] = []
        """Each with the key by which ranks match it."""


class _Guard:
    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._pid = os.getpid()
        self._store: Store | None = None
        self._is_lost = False
        # By identity: lookups in a dict with weak keys take several times as long, in every step.
        self._of: dict[int, tuple[ref[Optimizer], _Guarded]] = {}
        self._num_alike: dict[str, int] = {}

    @uncompiled_hook
    def after_step(self, optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        """Check an optimizer after a step. Called by torch."""
        known = self._of.get(id(optimizer))
        if known is None or known[0]() is not optimizer:
            if not has_gradients(optimizer):
                return
            known = self._of[id(optimizer)] = ref(optimizer), _Guarded()
        guarded = known[1]
        guarded.num_steps += 1
        if guarded.num_steps < guarded.next_due or self._is_lost:
            return
        guarded.next_due = guarded.num_steps + min(guarded.num_steps, MOST_STEPS)
        # Models of rankwise.replicate() are compared by it; a process that the script forked is not the rank.
        if os.getpid() == self._pid and self._has_group_of_all() and current_or_none() is None:
            try:
                self._compare(optimizer, guarded)
            except (OSError, TimeoutError, TypeError):
                # The launcher and its store have exited; or tensors have no plain values.
                self._is_lost = True

    def _compare(self, optimizer: Optimizer, guarded: _Guarded) -> None:
        if not guarded.parts:
            ignores_bare = any(name in sys.modules for name in OTHER_LIBRARIES)
            for part in stepped_by(optimizer):
                if part.is_wrapped or not ignores_bare:
                    guarded.parts.append((self._key_of(part), part))
        for key, part in guarded.parts:
            self._compare_part(key, part, optimizer, guarded.num_steps)

    def _key_of(self, part: Stepped) -> str:
        alike = f"{part.checksum_of_shapes():x}-{'-'.join(map(str, part.ranks))}"
        self._num_alike[alike] = self._num_alike.get(alike, 0) + 1
        return f"{alike}/{self._num_alike[alike]}"

    def _compare_part(self, model: str, part: Stepped, optimizer: Optimizer, num_steps: int) -> None:
        opened = self._opened()
        key, asked = f"{model}/{num_steps}", f"{model}/asked"
        # At first always: ranks that do not wait for one another may be past the step in which details are requested.
        if num_steps < NUM_FIRST_STEPS or opened.check(asked):
            self._post_details(model, part, optimizer, num_steps)
        code = short(combined([part.checksum(), settings_checksum(optimizer)]))
        sums = [opened.add(f"{key}/{name}", number) for name, number in (("x", code), ("xx", code * code))]
        if opened.add(f"{key}/n", 1) < len(part.ranks):
            return
        # The last rank: the sums include all ranks, even if others have added to them since.
        sums = [opened.add(f"{key}/{name}", 0) for name in ("x", "xx")]
        for name in ("x", "xx", "n"):
            opened.delete(f"{key}/{name}")
        if not are_equal(len(part.ranks), *map(float, sums)):
            opened.set(asked, "1")
        elif opened.check(asked):
            opened.delete(asked)

    def _post_details(self, model: str, part: Stepped, optimizer: Optimizer, num_steps: int) -> None:
        opened = self._opened()
        key, own_gradients = f"{model}/{num_steps}/details", f"{model}/own"
        own = dist.get_rank()
        opened.set(f"{key}/{own}", json.dumps(part.details(optimizer)))
        if opened.add(f"{key}/n", 1) < len(part.ranks):
            return
        reports: dict[int, Report] = {}
        for rank in part.ranks:
            reports[rank] = json.loads(opened.get(f"{key}/{rank}", ANSWER_SECONDS))
            opened.delete(f"{key}/{rank}")
        found = difference_between(reports, part, type(optimizer).__name__, num_steps)
        if found is None:
            return
        if part.is_wrapped and not found.has_own_gradients and not opened.check(own_gradients):
            raise found.error()
        # Ranks that step alone and are averaged occasionally: even if their gradients happen to agree.
        opened.set(own_gradients, "1")
        if opened.add("told", 1) == 1:
            warn(found.warning(), all_ranks=True)

    def _has_group_of_all(self) -> bool:
        """Return whether the script has opened torch's default group, of all ranks of the job."""
        return dist.is_initialized() and dist.get_world_size() == self._world_size

    def _opened(self) -> Store:
        if self._store is None:
            reading = read_process()
            if reading.address is None or reading.secret is None:
                message = "the variables of rankwise's launcher were removed from this process"
                raise OSError(message)
            opened = opening.connect(*reading.address, ANSWER_SECONDS, secret=reading.secret.encode())
            self._store = opened.prefixed(f"attempt/{reading.attempt}/guard")
        return self._store
