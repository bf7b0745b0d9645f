# SPDX-License-Identifier: Apache-2.0
"""A server's main thread: it takes the workers' messages, updates its parameters, and answers."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from rankwise.errors import ConfigurationError, PeerMissing, fold_ranks, fold_values
from rankwise.health.collective_timeout import SLICE_SECONDS
from rankwise.health.failure_detector import EXPLANATION_SECONDS
from rankwise.log import warn
from rankwise.parameter_server.shard import are_sums, checked_weights, weighted_mean
from rankwise.parameter_server.snapshot import set_options

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rankwise.parameter_server.checks import ServerSetup
    from rankwise.parameter_server.messages import ReceivedMessage, ServerMessage, WorkerConnections
    from rankwise.parameter_server.shard import ParameterShard
    from rankwise.parameter_server.snapshot import Options, ServerSnapshots

MISSING_POLL_SECONDS = 1.0
"""How often a server looks for workers that have exited although their connection is open."""


class StalenessBound:
    """The steps of all workers.

    Args:
        workers: their ranks.
        max_staleness: how many steps a worker may be ahead of the slowest when it begins one; ``None`` for any.
    """

    def __init__(self, workers: Iterable[int], max_staleness: int | None) -> None:
        self._max_staleness = max_staleness
        self._steps = dict.fromkeys(workers, 0)
        self._loops: dict[int, Counter[int]] = {worker: Counter() for worker in self._steps}
        """How many loops each has finished: by loader, and under 0 those in which it took steps."""
        self._resting: set[int] = set()
        self.failed: set[int] = set()
        """Workers whose connection ended without a leave message."""
        self.left: set[int] = set()
        """Workers that sent a leave message."""

    @property
    def living(self) -> set[int]:
        """The workers that are still connected."""
        return set(self._steps)

    def step(self, worker: int) -> None:
        """Count a step of a worker."""
        if worker in self._steps:
            self._steps[worker] += 1
            self._resting.discard(worker)

    def end_loop(self, worker: int, loader: int, *, has_stepped: bool, count: int = 1) -> None:
        """Count ``count`` loops that a worker has finished over a loader, 0 for one that is not rankwise's.

        If it took steps in them, no other worker waits for it until its next step.
        """
        if worker in self._steps:
            self._loops[worker][loader] += count
            if has_stepped:
                self._loops[worker][0] += loader != 0
                self._resting.add(worker)

    def remove(self, worker: int, *, has_failed: bool) -> None:
        """Stop counting a worker that has left or failed."""
        if self._steps.pop(worker, None) is None:
            return
        self._resting.discard(worker)
        if has_failed:
            self.failed.add(worker)
        else:
            self.left.add(worker)

    def may_step(self, worker: int) -> bool:
        """Return whether a worker may begin another step."""
        if self._max_staleness is None or worker not in self._steps:
            return True
        others = [steps for other, steps in self._steps.items() if other not in self._resting]
        return self._steps[worker] - min(others, default=self._steps[worker]) <= self._max_staleness

    def slowest(self) -> list[int]:
        """Return the workers that the others wait for."""
        others = {worker: steps for worker, steps in self._steps.items() if worker not in self._resting}
        return sorted(worker for worker, steps in others.items() if steps == min(others.values()))

    def only_wait_for(self, silent: set[int]) -> set[int]:
        """Return the workers amid a loop, if all of them are silent and another worker has finished or left."""
        amid = self.living - self._resting
        is_anyone_done = bool(self._resting or self.left)
        return amid if is_anyone_done and amid <= silent else set()

    def num_loops(self, loader: int) -> int:
        """Return how many loops over a loader every connected worker has finished."""
        return min((self._loops[worker][loader] for worker in self._steps), default=0)


class ServerLoop:
    """One server, from ``parameter_server`` to the end of the world.

    Its many fields belong to one loop over messages: what it serves, to which workers, and what it knows of each.

    Args:
        setup: of all ranks.
        shard: the parameters.
        connections: to the workers.
        staleness: how many steps and loops the workers have taken.
        snapshots: writes the state to files; ``None`` saves nothing.
    """

    def __init__(
        self,
        setup: ServerSetup,
        shard: ParameterShard,
        connections: WorkerConnections,
        staleness: StalenessBound,
        snapshots: ServerSnapshots | None,
    ) -> None:
        self.loader_states: dict[int, dict[str, Any]] = {}
        """The position of each worker's training loop."""
        self._shard = shard
        self._connections = connections
        self._staleness = staleness
        self._is_sync = setup.settings.is_sync
        self._snapshots = snapshots
        self._world = setup.world
        self._detector = setup.detector
        self._num_loops: Counter[int] = Counter()
        """How many loops have been served, as ``staleness`` counts them."""
        self._seen = dict.fromkeys(setup.settings.workers, shard.num_updates)
        """The update after which each worker was last answered."""
        self._waiting: dict[int, ServerMessage] = {}
        """Steps that have arrived and are not answered, in order of arrival."""
        self._waiting_since: float | None = None
        self._last_message_at = dict.fromkeys(setup.settings.workers, time.monotonic())
        """When the last message of each worker arrived."""
        self._groups: dict[int, list[Options]] = {}
        """Options of the optimizer that each worker sent last."""
        self._newest_groups: list[Options] = []

    @property
    def num_updates(self) -> int:
        """How many updates were made."""
        return self._shard.num_updates

    def serve(self, loader: int) -> None:
        """Return when every worker has reached the end of one more loop over a loader, or has left.

        Args:
            loader: its number; 0 for any in which steps were taken.

        Raises:
            PeerFailed: a rank failed that the others cannot continue without.
            PeerMissing: such a rank exited without reporting an error, all workers have exited, or one did not take
                its step within the world's timeout.
        """
        staleness = self._staleness
        awaited = self._num_loops[loader] + 1
        self._run(lambda: not staleness.living or staleness.num_loops(loader) >= awaited)
        self._num_loops[loader] = awaited
        # Loops over a loader count here too, so that a later serve() does not take one for its own.
        self._num_loops[0] = max(self._num_loops[0], staleness.num_loops(0))
        self._save()

    def leave(self) -> None:
        """Serve until all workers have left, then close."""
        self._run(lambda: not self._staleness.living)
        self._save()
        self._connections.close()

    def _save(self) -> None:
        if self._snapshots is not None:
            self._snapshots.save(self._shard.num_updates, self.loader_states)

    def _run(self, is_done: Callable[[], bool]) -> None:
        connections = self._connections
        next_check = time.monotonic() + MISSING_POLL_SECONDS
        while not is_done():
            with connections.changed:
                connections.changed.wait_for(lambda: bool(connections.arrivals), SLICE_SECONDS)
                arrival = connections.arrivals.popleft() if connections.arrivals else None
            if arrival is not None:
                self._handle(arrival)
            elif self._detector.error is not None:
                raise self._detector.error
            if time.monotonic() > next_check:
                next_check = time.monotonic() + MISSING_POLL_SECONDS
                self._check_for_missing()
        preemption = self._detector.preemption
        if not self._staleness.living and preemption.is_asked and not preemption.has_stopped:
            self._save()
            preemption.stop()

    def _handle(self, arrival: ReceivedMessage) -> None:
        worker, message = arrival.worker, arrival.message
        self._last_message_at[worker] = time.monotonic()
        if message is None:
            self._lose(worker, arrival.reason)
        elif message.head["kind"] == "end_loop":
            self._staleness.end_loop(worker, message.head["loader"], has_stepped=True)
            self._answer(worker)
        elif message.head["kind"] == "end_loops":
            for loader, count in message.head["loops"]:
                self._staleness.end_loop(worker, loader, has_stepped=False, count=count)
            self._connections.answer(worker, {}, self._connections.bodies[worker], [], [])
        else:
            self._staleness.step(worker)
            self._waiting[worker] = message
            if "groups" in message.head:
                self._groups[worker] = self._newest_groups = message.head["groups"]
            if "loader" in message.head:
                self.loader_states[worker] = message.head["loader"]
            if not self._is_sync:
                self._update([worker])
        self._answer_waiting()

    def _answer_waiting(self) -> None:
        if self._is_sync:
            if self._waiting and self._staleness.left:
                raise self._uneven()
            if self._waiting and self._waiting.keys() >= self._staleness.living:
                self._update(sorted(self._waiting))
                for worker in sorted(self._waiting):
                    self._answer(worker)
                self._waiting.clear()
        else:
            for worker in [worker for worker in self._waiting if self._staleness.may_step(worker)]:
                del self._waiting[worker]
                self._answer(worker)
        self._waiting_since = (self._waiting_since or time.monotonic()) if self._waiting else None

    def _update(self, workers: Sequence[int]) -> None:
        messages = [self._waiting[worker] for worker in workers]
        reported = [message.head["weights"] for message in messages]
        if are_sums(workers, reported, [message.head["sums"] for message in messages]):
            weights, total = [float(any(one)) for one in reported], 1.0
        else:
            weights = checked_weights(workers, reported)
            total = sum(weights)
        if self._is_sync:
            self._check_groups(workers)
        # A script that steps its scheduler on all ranks has changed the server's options.
        set_options(self._shard.optimizer, self._newest_groups)
        parts = [self._gradients(worker, message) for worker, message in zip(workers, messages, strict=True)]
        means = [
            weighted_mean(list(zip(weights, of_parameter, strict=True)), total)
            for of_parameter in zip(*parts, strict=True)
        ]
        if total <= 0 and all(mean is None for mean in means):
            return
        self._shard.update(means)
        if self._snapshots is not None and self._shard.num_updates % self._snapshots.every == 0:
            self._save()

    def _check_groups(self, workers: Sequence[int]) -> None:
        reported = {worker: self._groups[worker] for worker in workers}
        first = reported[workers[0]]
        if all(groups == first for groups in reported.values()):
            return
        differs = {
            worker: "  ".join(
                f"{name}={value}"
                for group, other in zip(groups, zip(*reported.values(), strict=True), strict=True)
                for name, value in group.items()
                if any(one.get(name) != value for one in other)
            )
            for worker, groups in reported.items()
        }
        raise ConfigurationError(
            "The optimizer's options differ between workers, but all share one update.",
            where=str(self._world),
            evidence=fold_values(differs),
            do="change them from values that are the same on every worker: pass a loss over all ranks to "
            "ReduceLROnPlateau",
        )

    def _gradients(self, worker: int, message: ServerMessage) -> list[torch.Tensor | None]:
        body = self._connections.bodies[worker]
        found: list[torch.Tensor | None] = [None] * len(body.views)
        for position in message.head["whole"]:
            found[position] = body.views[position]
        for position in message.head.get("zeros", ()):
            found[position] = body.views[position].zero_()
        for rows in message.rows:
            shape = body.views[rows.position].shape
            sparse = torch.sparse_coo_tensor(
                rows.indices[None], rows.values, shape, is_coalesced=True, check_invariants=True
            )
            found[rows.position] = sparse
        return found

    def _answer(self, worker: int) -> None:
        body, whole, rows = self._shard.since(self._seen[worker])
        self._seen[worker] = self._shard.num_updates
        self._connections.answer(worker, {"updates": self._shard.num_updates}, body, whole, rows)

    # -- workers that left or were lost ------------------------------------------------------------

    def _lose(self, worker: int, reason: str) -> None:
        """Continue without a worker, or raise if that is impossible."""
        if worker not in self._staleness.living:
            return
        self._waiting.pop(worker, None)
        if reason and self._is_sync:
            raise self._reason(worker, reason)
        self._staleness.remove(worker, has_failed=bool(reason))
        if not reason:
            return
        # Do not resume from its position: the others have continued.
        self.loader_states.pop(worker, None)
        if not self._staleness.living and not self._staleness.left:
            raise self._reason(worker, reason)
        warn(f"worker {worker} was lost ({reason}); the others continue without it", all_ranks=True)

    def _reason(self, worker: int, reason: str) -> Exception:
        """Return the error that ends the job: the rank's own report, if one arrives."""
        deadline = time.monotonic() + EXPLANATION_SECONDS
        while self._detector.error is None and time.monotonic() < deadline:
            with self._connections.changed:
                self._connections.changed.wait(SLICE_SECONDS)
        if self._detector.error is not None:
            return self._detector.error
        lost = sorted(self._staleness.failed | {worker})
        return PeerMissing(
            f"{'A worker' if len(lost) == 1 else 'Every worker'} of the parameter servers was lost: "
            f"{fold_ranks(lost)}.",
            ranks=lost,
            where=str(self._world),
            evidence=reason,
            do="look at the output of that rank; start the job with --max-restarts 3, and give parameter_server a "
            "directory=, so that it continues from the servers' last state",
        )

    def _uneven(self) -> PeerMissing:
        left, waiting = sorted(self._staleness.left), sorted(self._waiting)
        return PeerMissing(
            f"Workers of the parameter servers take different numbers of steps: {fold_ranks(left)} has left.",
            ranks=left,
            where=str(self._world),
            evidence=f"in optimizer.step(): {fold_ranks(waiting)}",
            do="take the same number of steps on every worker: iterate over rankwise.DataLoader, the same number of "
            "times on each",
        )

    def _silent_for(self, seconds: float) -> set[int]:
        now = time.monotonic()
        return {worker for worker in self._staleness.living if now - self._last_message_at[worker] > seconds}

    def _check_for_missing(self) -> None:
        """Drop workers that are known to have failed; raise if one has been waited for too long."""
        for worker in sorted(self._staleness.living):
            if self._detector.departed(worker):
                self._connections.drop(worker)
        since, limit = self._waiting_since, self._detector.timeout_seconds
        if not self._is_sync:
            for worker in self._staleness.only_wait_for(self._silent_for(limit)):
                warn(f"worker {worker} has sent nothing for {limit:.0f} s, and all others are done", all_ranks=True)
                self._connections.drop(worker)
        if since is None or time.monotonic() - since < limit:
            return
        missing = sorted(self._staleness.living - self._waiting.keys()) if self._is_sync else self._staleness.slowest()
        raise PeerMissing(
            f"Workers of the parameter servers timed out after {limit:.0f} s waiting for {fold_ranks(missing)}.",
            ranks=missing,
            where=str(self._world),
            do="take the same number of steps on every worker: iterate over rankwise.DataLoader; for longer waits "
            "set join(timeout_seconds=...)",
        )
