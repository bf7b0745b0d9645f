# SPDX-License-Identifier: Apache-2.0
"""A server's main thread: takes what workers send, updates the parameters it keeps, and answers."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from rankwise.errors import ConfigurationError, PeerMissing, fold_ranks, fold_values
from rankwise.log import warn
from rankwise.parallel.server.kept import are_sums, checked_weights, weighted_mean
from rankwise.parallel.server.options import set_options
from rankwise.watch import EXPLANATION_SECONDS, SLICE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rankwise.parallel.server.kept import Kept
    from rankwise.parallel.server.options import Options
    from rankwise.parallel.server.pace import Pace
    from rankwise.parallel.server.saved import Saved
    from rankwise.parallel.server.service import Arrival, Service
    from rankwise.parallel.server.wire import Message
    from rankwise.watch import Watch
    from rankwise.world import World

PATIENCE_SECONDS = 1.0
"""How often a server looks for workers that are gone without their connection saying so."""


class Serving:
    """One server, from ``parameter_server`` to the end of the world.

    Args:
        kept: the parameters.
        service: the connections.
        pace: how far the workers are.
        is_sync: whether a step is the mean of all workers' gradients, or of each worker's as it comes.
        saved: where the state is saved, if anywhere.
    """

    def __init__(
        self,
        kept: Kept,
        service: Service,
        pace: Pace,
        *,
        is_sync: bool,
        saved: Saved | None,
        world: World,
        watch: Watch,
    ) -> None:
        self.loader_states: dict[int, dict[str, Any]] = {}
        """Where the training loop of each worker stands."""
        self._kept = kept
        self._service = service
        self._pace = pace
        self._is_sync = is_sync
        self._saved = saved
        self._world = world
        self._watch = watch
        self._workers = sorted(pace.living)
        self._num_loops: Counter[int] = Counter()
        """How many loops have been served, as the pace counts them."""
        self._seen = dict.fromkeys(self._workers, kept.num_updates)
        """After which update each worker was answered last."""
        self._waiting: dict[int, Message] = {}
        """Steps that have come and are not answered, in the order in which they came."""
        self._waiting_since: float | None = None
        self._heard = dict.fromkeys(self._workers, time.monotonic())
        """When each worker said something last."""
        self._groups: dict[int, list[Options]] = {}
        """Options of the optimizer, as each worker has told them."""
        self._newest_groups: list[Options] = []

    @property
    def num_updates(self) -> int:
        """Updates there have been."""
        return self._kept.num_updates

    def serve(self, loader: int) -> None:
        """Return when every worker has come to the end of one more loop over a loader, or is gone.

        Args:
            loader: its number; 0 for any in which steps were taken.

        Raises:
            PeerFailed: a rank failed that the others cannot go on without.
            PeerMissing: the same of a rank that is gone without a word; all workers are gone; or one did not take
                its step within the world's limit.
        """
        pace = self._pace
        awaited = self._num_loops[loader] + 1
        self._run(lambda: not pace.living or pace.num_loops(loader) >= awaited)
        self._num_loops[loader] = awaited
        # Those over a loader had steps too, which a loop over something else is not to be mistaken for.
        self._num_loops[0] = max(self._num_loops[0], pace.num_loops(0))
        self._save()

    def leave(self) -> None:
        """Serve until all workers have left, then close."""
        self._run(lambda: not self._pace.living)
        self._save()
        self._service.close()

    def _save(self) -> None:
        if self._saved is not None:
            self._saved.save(self._kept.num_updates, self.loader_states)

    def _run(self, is_done: Callable[[], bool]) -> None:
        service = self._service
        next_look = time.monotonic() + PATIENCE_SECONDS
        while not is_done():
            with service.changed:
                service.changed.wait_for(lambda: bool(service.arrivals), SLICE_SECONDS)
                arrival = service.arrivals.popleft() if service.arrivals else None
            if arrival is not None:
                self._take(arrival)
            elif self._watch.error is not None:
                raise self._watch.error
            if time.monotonic() > next_look:
                next_look = time.monotonic() + PATIENCE_SECONDS
                self._look_for_missing()
        stopping = self._watch.stopping
        if not self._pace.living and stopping.is_asked and not stopping.has_stopped:
            self._save()
            stopping.stop()

    def _take(self, arrival: Arrival) -> None:
        worker, message = arrival.worker, arrival.message
        self._heard[worker] = time.monotonic()
        if message is None:
            self._lose(worker, arrival.reason)
        elif message.head["kind"] == "end_loop":
            self._pace.end_loop(worker, message.head["loader"], has_stepped=message.head["has_stepped"])
            if message.head["has_stepped"]:
                self._answer(worker)
        else:
            self._pace.step(worker)
            self._waiting[worker] = message
            if "groups" in message.head:
                self._groups[worker] = self._newest_groups = message.head["groups"]
            if "loader" in message.head:
                self.loader_states[worker] = message.head["loader"]
            if not self._is_sync:
                self._update([worker])
        self._answer_waiting()

    def _answer_waiting(self) -> None:
        """Answer those who may go on."""
        if self._is_sync:
            if self._waiting and self._pace.left:
                raise self._uneven()
            if self._waiting and self._waiting.keys() >= self._pace.living:
                self._update(sorted(self._waiting))
                for worker in sorted(self._waiting):
                    self._answer(worker)
                self._waiting.clear()
        else:
            for worker in [worker for worker in self._waiting if self._pace.may_go_on(worker)]:
                del self._waiting[worker]
                self._answer(worker)
        self._waiting_since = (self._waiting_since or time.monotonic()) if self._waiting else None

    def _update(self, workers: Sequence[int]) -> None:
        """Take one step with the gradients that these workers have sent."""
        messages = [self._waiting[worker] for worker in workers]
        told = [message.head["weights"] for message in messages]
        if are_sums(workers, told, [message.head["sums"] for message in messages]):
            weights, total = [float(any(one)) for one in told], 1.0
        else:
            weights = checked_weights(workers, told)
            total = sum(weights)
        if self._is_sync:
            self._check_groups(workers)
        # A script that steps its scheduler on all ranks has changed the server's own.
        set_options(self._kept.optimizer, self._newest_groups)
        parts = [self._gradients(worker, message) for worker, message in zip(workers, messages, strict=True)]
        means = [
            weighted_mean(list(zip(weights, of_parameter, strict=True)), total)
            for of_parameter in zip(*parts, strict=True)
        ]
        if total <= 0 and all(mean is None for mean in means):
            return
        self._kept.update(means)
        if self._saved is not None and self._kept.num_updates % self._saved.every == 0:
            self._save()

    def _check_groups(self, workers: Sequence[int]) -> None:
        told = {worker: self._groups[worker] for worker in workers}
        first = told[workers[0]]
        if all(groups == first for groups in told.values()):
            return
        differs = {
            worker: "  ".join(
                f"{name}={value}"
                for group, other in zip(groups, zip(*told.values(), strict=True), strict=True)
                for name, value in group.items()
                if any(one.get(name) != value for one in other)
            )
            for worker, groups in told.items()
        }
        raise ConfigurationError(
            "The optimizer's options differ between workers, and there is one update for all.",
            where=str(self._world),
            evidence=fold_values(differs),
            do="let what changes them be the same on every worker: give ReduceLROnPlateau a loss of all ranks",
        )

    def _gradients(self, worker: int, message: Message) -> list[torch.Tensor | None]:
        """Return what a worker has sent, by position."""
        body = self._service.bodies[worker]
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
        body, whole, rows = self._kept.since(self._seen[worker])
        self._seen[worker] = self._kept.num_updates
        self._service.answer(worker, {"updates": self._kept.num_updates}, body, whole, rows)

    # -- who is gone -------------------------------------------------------------------------------

    def _lose(self, worker: int, reason: str) -> None:
        """Go on without a worker, or raise where that cannot be."""
        if worker not in self._pace.living:
            return
        self._waiting.pop(worker, None)
        if reason and self._is_sync:
            raise self._reason(worker, reason)
        self._pace.go(worker, has_failed=bool(reason))
        if not reason:
            return
        # Where it stood is no place to go on from: the others went on.
        self.loader_states.pop(worker, None)
        if not self._pace.living and not self._pace.left:
            raise self._reason(worker, reason)
        warn(f"worker {worker} is gone ({reason}); the others go on without it", all_ranks=True)

    def _reason(self, worker: int, reason: str) -> Exception:
        """Return what ends the job: what the rank said itself, if it did."""
        deadline = time.monotonic() + EXPLANATION_SECONDS
        while self._watch.error is None and time.monotonic() < deadline:
            with self._service.changed:
                self._service.changed.wait(SLICE_SECONDS)
        if self._watch.error is not None:
            return self._watch.error
        gone = sorted(self._pace.failed | {worker})
        return PeerMissing(
            f"{'A worker' if len(gone) == 1 else 'Every worker'} of the parameter servers is gone: {fold_ranks(gone)}.",
            ranks=gone,
            where=str(self._world),
            evidence=reason,
            do="look at the output of that rank; start the job with --max-restarts 3, and give parameter_server a "
            "directory=, for it to go on from the servers' last state",
        )

    def _uneven(self) -> PeerMissing:
        left, waiting = sorted(self._pace.left), sorted(self._waiting)
        return PeerMissing(
            f"Workers of the parameter servers take different numbers of steps: {fold_ranks(left)} has left.",
            ranks=left,
            where=str(self._world),
            evidence=f"in optimizer.step(): {fold_ranks(waiting)}",
            do="let every worker take the same number of steps: iterate over rankwise.DataLoader, as often on each",
        )

    def _silent_for(self, seconds: float) -> set[int]:
        now = time.monotonic()
        return {worker for worker in self._pace.living if now - self._heard[worker] > seconds}

    def _look_for_missing(self) -> None:
        """Let go of workers that are known to have failed, and raise where one is waited for too long."""
        for worker in sorted(self._pace.living):
            if self._watch.departed(worker):
                self._service.drop(worker)
        since, limit = self._waiting_since, self._watch.timeout_seconds
        if not self._is_sync:
            for worker in self._pace.only_wait_for(self._silent_for(limit)):
                warn(f"worker {worker} has said nothing for {limit:.0f} s, and all others are done", all_ranks=True)
                self._service.drop(worker)
        if since is None or time.monotonic() - since < limit:
            return
        missing = sorted(self._pace.living - self._waiting.keys()) if self._is_sync else self._pace.slowest()
        raise PeerMissing(
            f"Workers of the parameter servers have waited {limit:.0f} s in vain. Missing: {fold_ranks(missing)}.",
            ranks=missing,
            where=str(self._world),
            do="let every worker take the same number of steps: iterate over rankwise.DataLoader. Where the wait is "
            "meant, join(timeout_seconds=...) is the limit",
        )
