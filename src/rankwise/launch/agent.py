# SPDX-License-Identifier: Apache-2.0
"""Supervises this machine's part of a job: does what the coordinator says, and tells it what happens here.

Prints nothing itself and knows no other machine. Imported by the launcher's start.
"""

from __future__ import annotations

import contextlib
import select
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from rankwise.errors import ConfigurationError, LaunchError, fold_ranks
from rankwise.launch import failure
from rankwise.launch.coordinator import RETURN_SECONDS
from rankwise.launch.failure import Failure
from rankwise.launch.link import Link, LinkLost
from rankwise.launch.ranks import FOR_RESTART, KILLED, Layout
from rankwise.launch.torch_store import Master
from rankwise.stopping import STOPPED_EXIT_CODE

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.launch.asking import Asking
    from rankwise.launch.failure import FailedAttempt
    from rankwise.launch.interrupts import Interrupts
    from rankwise.launch.ranks import LocalRanks

LOOK_SECONDS = 0.5
"""How often the agent looks at what nobody tells it: silence, stopped processes."""
STOP_SECONDS = 3.0
"""How long ranks have to end after Ctrl-C or SIGTERM."""
AGAIN_SECONDS = 1.0
"""How long a machine that was told to wait waits before it comes again."""
LOST_EXIT_CODE = 1
TERMINATE_SECONDS = 1.0
"""How long a rank has to end between SIGTERM and SIGKILL, after another's failure."""


class Interrupted(Exception):
    """A signal has come that ends this machine's part of the job."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number


@dataclass(slots=True)
class _Ending:
    """When the ranks that still run are asked to end, and when they are killed."""

    terminate_at: float
    kill_at: float
    at_once: bool
    """Nobody is waited for, since all are started anew."""
    has_asked: bool = False


class Agent:
    """One machine's part of a job, from the first attempt to the last."""

    def __init__(
        self,
        ranks: LocalRanks,
        *,
        open_link: Callable[[float], Link],
        interrupts: Interrupts,
        asking: Asking,
        say: Callable[[str], None],
        on_failed_attempt: Callable[[FailedAttempt], None],
        hosts_job: bool,
        can_return: bool,
        can_restart: bool,
        saves_on_terminate: bool,
    ) -> None:
        self._ranks = ranks
        self._open_link = open_link
        self._interrupts = interrupts
        self._asking = asking
        self._say = say
        self._on_failed_attempt = on_failed_attempt
        self._hosts_job = hosts_job
        self._can_return = can_return
        self._can_restart = can_restart
        self._saves_on_terminate = saves_on_terminate
        self._link: Link | None = None
        self._is_attempt_on = False
        self._ending: _Ending | None = None
        self._kill_at: dict[int, float] = {}
        """When ranks are killed that the others go on without, should they not have ended by then."""
        self._exit_code: int | None = None
        self._deeds: dict[str, Callable[[dict[str, Any]], None]] = {
            "start": self._start,
            "stop": self._begin_to_end,
            "end_rank": self._begin_to_end_rank,
            "save": self._have_saved,
            "say": self._say_for_all,
            "report": self._tell_of_failure,
            "refuse": self._be_refused,
            "wait": self._come_again,
            "end": self._take_leave,
        }

    def run(self, timeout_seconds: float) -> int:
        """Take part until the job is over; return its exit code, as a shell tells it.

        Args:
            timeout_seconds: how long to look for the coordinator at first.

        Raises:
            ConfigurationError: the coordinator refused this machine.
            LaunchError: the coordinator cannot be reached, is lost for good, or a rank could not be started.
        """
        try:
            self._link = self._open_link(timeout_seconds)
            return self._take_part()
        except Interrupted as interrupted:
            return self._end_at_once(interrupted.number)
        finally:
            # Where the server is gone, the ranks are too, and the reason is on its way up.
            with contextlib.suppress(OSError, LaunchError):
                self._ranks.clear()
            if self._link is not None:
                self._link.close()

    def _take_part(self) -> int:
        while self._exit_code is None:
            if self._link is None:
                return LOST_EXIT_CODE
            try:
                self._turn(self._link)
            except LinkLost as lost:
                self._link = self._come_back(lost)
        return self._exit_code

    def raise_if_interrupted(self) -> None:
        """Raise what a signal asks for; for waits in which nothing else is heard.

        Raises:
            Interrupted: a signal has come.
        """
        readable, _, _ = select.select([self._interrupts.fileno()], [], [], 0)
        if readable:
            self._heed(self._interrupts.take())

    # -- one turn of the loop ----------------------------------------------------------------------

    def _turn(self, link: Link) -> None:
        own = self._ranks.sources()
        sources = [link, self._asking, self._interrupts.fileno(), *own]
        readable, _, _ = select.select(sources, [], [], self._patience())
        if self._interrupts.fileno() in readable:
            self._heed(self._interrupts.take())
        for heard in self._ranks.hear([source for source in own if source in readable]):
            self._tell(link, heard)
        if link in readable:
            for message in link.receive():
                self._obey(message)
                if self._link is not link:
                    return
        if self._asking in readable:
            self._asking.serve(link)
        link.check()
        self._look_for_stopped(link)
        self._go_on_ending()
        if self._is_attempt_on and not self._ranks.running:
            self._conclude(link)

    def _patience(self) -> float:
        if self._ending is None:
            return LOOK_SECONDS
        next_step = self._ending.kill_at if self._ending.has_asked else self._ending.terminate_at
        return min(LOOK_SECONDS, max(0.0, next_step - time.monotonic()))

    def _tell(self, link: Link, heard: Failure | int) -> None:
        if self._ranks.layout is None:
            return
        attempt = self._ranks.layout.attempt
        if isinstance(heard, Failure):
            link.send({"do": "fail", "attempt": attempt, "failure": failure.to_dict(heard)})
        else:
            link.send({"do": "left", "attempt": attempt, "rank": heard})

    def _look_for_stopped(self, link: Link) -> None:
        layout = self._ranks.layout
        if layout is None or layout.world_size == 1:
            return
        for failed, pid in self._ranks.look_for_stopped(time.monotonic(), may_end=self._can_restart):
            if self._can_restart:
                self._tell(link, failed)
            else:
                self._say(f"[rankwise] rank {failed.rank} has been stopped (SIGSTOP); kill -CONT {pid} lets it go on\n")

    # -- what the coordinator says -----------------------------------------------------------------

    def _obey(self, message: dict[str, Any]) -> None:
        do = message.pop("do")
        if do in {"look", "looked"}:
            self._asking.heed(do, message, self._link)
        elif do != "alive":
            self._deeds[do](message)

    def _start(self, message: dict[str, Any]) -> None:
        self._ending = None
        self._kill_at.clear()
        self._is_attempt_on = True
        hostnames, master = message.pop("hostnames"), message.pop("master")
        layout = Layout(**message, master=None if master is None else Master.from_message(master))
        if layout.num_nodes > 1:
            self._say(_place(layout, self._ranks.num_ranks, hostnames))
        self._ranks.start(layout)

    def _begin_to_end(self, message: dict[str, Any]) -> None:
        if self._ranks.layout is None or message["attempt"] != self._ranks.layout.attempt:
            return
        terminate_at = time.monotonic() + message["settle_seconds"]
        at_once = not message["settle_seconds"]
        kill_at = terminate_at + (0.0 if at_once else TERMINATE_SECONDS)
        self._ending = _Ending(terminate_at, kill_at, at_once, has_asked=at_once)

    def _begin_to_end_rank(self, message: dict[str, Any]) -> None:
        if self._ranks.layout is not None and message["attempt"] == self._ranks.layout.attempt:
            self._kill_at[message["rank"]] = time.monotonic() + message["settle_seconds"]

    def _have_saved(self, _: dict[str, Any]) -> None:
        """Ask the one rank of the job to save and end: alone it follows no event log."""
        for rank in sorted(self._ranks.running):
            self._ranks.send_signal(rank, signal.SIGUSR2)

    def _say_for_all(self, message: dict[str, Any]) -> None:
        # Once for all machines: their output often comes together.
        if self._hosts_job:
            self._say(message["text"])

    def _tell_of_failure(self, message: dict[str, Any]) -> None:
        self._on_failed_attempt(failure.from_dict(message["failed"]))

    def _be_refused(self, message: dict[str, Any]) -> NoReturn:
        raise ConfigurationError(message["what"], evidence=message["evidence"] or None, do=message["advice"])

    def _come_again(self, _message: dict[str, Any]) -> None:
        """Introduce this machine anew a little later: another may stand in its place that is gone."""
        if self._link is not None:
            self._link.close()
        if select.select([self._interrupts.fileno()], [], [], AGAIN_SECONDS)[0]:
            self._heed(self._interrupts.take())
        self._link = self._open_link(RETURN_SECONDS)

    def _take_leave(self, message: dict[str, Any]) -> None:
        self._exit_code = message["exit_code"]
        if message["what"]:
            error = LaunchError(message["what"], evidence=message["evidence"] or None, do=message["advice"] or None)
            self._say(f"[rankwise] {error}\n")

    def _conclude(self, link: Link) -> None:
        """Tell how the ranks of this attempt ended, once nothing they started is left."""
        if self._ranks.layout is None:
            return
        self._is_attempt_on, self._ending = False, None
        self._ranks.clear()
        link.send({"do": "end", "attempt": self._ranks.layout.attempt, "report": self._ranks.report()})

    def _go_on_ending(self) -> None:
        ending, now = self._ending, time.monotonic()
        for rank in [rank for rank, kill_at in self._kill_at.items() if now >= kill_at]:
            del self._kill_at[rank]
            self._ranks.kill(rank)
        if ending is None or not self._ranks.running:
            return
        if not ending.has_asked and now >= ending.terminate_at:
            ending.has_asked = True
            self._ranks.signal_all(signal.SIGTERM)
        elif ending.has_asked and now >= ending.kill_at:
            self._ranks.clear(FOR_RESTART if ending.at_once else KILLED)

    # -- signals, and a coordinator that is gone ---------------------------------------------------

    def _heed(self, number: signal.Signals) -> None:
        asks = number == signal.SIGUSR2 or (number == signal.SIGTERM and self._saves_on_terminate)
        if not asks or not self._is_attempt_on or self._link is None:
            raise Interrupted(number)
        self._saves_on_terminate = False
        self._say(f"[rankwise] {number.name}: the ranks save at their next step and end\n")
        self._link.send({"do": "ask_to_stop", "reason": number.name})

    def _end_at_once(self, number: signal.Signals) -> int:
        """End the ranks: politely, then, or at a second signal, not."""
        self._ranks.signal_all(number)
        deadline = time.monotonic() + STOP_SECONDS
        own = self._ranks.sources()
        while self._ranks.running and (left := deadline - time.monotonic()) > 0:
            readable, _, _ = select.select([self._interrupts.fileno(), *own], [], [], left)
            if self._interrupts.fileno() in readable:
                self._interrupts.take()
                break
            self._ranks.hear(readable)
        self._ranks.clear()
        # Asked to save while there was nothing to save: the job may be started again all the same.
        exit_code = STOPPED_EXIT_CODE if number == signal.SIGUSR2 else 128 + number
        if self._link is not None:
            leave = {"do": "leave", "signal": number.name, "exit_code": exit_code, "ends_job": self._hosts_job}
            with contextlib.suppress(LinkLost):
                self._link.send(leave)
        self._ranks.report()
        self._say(f"[rankwise] {number.name}: every rank has been ended\n")
        return exit_code

    def _come_back(self, lost: LinkLost) -> Link | None:
        """End what runs here, and look for the coordinator again; return ``None`` where there is no use or none."""
        self._ranks.clear()
        self._is_attempt_on, self._ending = False, None
        if self._link is not None:
            self._link.close()
            self._link = None
        if not self._can_return:
            self._say(
                f"[rankwise] the rendezvous is lost: {lost}; every rank here has been ended. "
                "Start the job anew; --max-restarts 3 lets it survive that\n"
            )
            return None
        self._say(f"[rankwise] the rendezvous is lost: {lost}; looking for it for {RETURN_SECONDS:.0f} s\n")
        try:
            return self._open_link(RETURN_SECONDS)
        except LaunchError as error:
            self._say(f"[rankwise] {error}\n")
            return None


def _place(layout: Layout, num_ranks: int, hostnames: list[str]) -> str:
    ranks = fold_ranks(range(layout.first_rank, layout.first_rank + num_ranks))
    nodes = f"node {layout.node_rank} of {layout.num_nodes} ({', '.join(hostnames)})"
    return f"[rankwise] {ranks} of {layout.world_size} here, {nodes}\n" if layout.num_nodes > 1 else ""
