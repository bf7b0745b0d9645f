# SPDX-License-Identifier: Apache-2.0
"""``--ray`` and ``launch(on="ray")``: starts a job's nodes on a cluster of Ray, and replaces those that are lost.

This process, a driver of Ray, serves the job and runs no rank. Each node has an actor, which starts the launcher there.
Imported by the command line and by the launch of a function.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import secrets
import select
import signal
import sys
import threading
import time
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rankwise.errors import LaunchError
from rankwise.launch.agent.output import STDOUT
from rankwise.launch.agent.signals import PendingSignals, end_quietly
from rankwise.launch.auth import draw_secret
from rankwise.launch.controller.coordinator import Coordinator
from rankwise.launch.controller.server import JobServer, TorchStores
from rankwise.launch.function.call import message_of, refusal
from rankwise.launch.hosts.ray_cluster import Reservation, connect, needs_of_rank, ranks_of_nodes
from rankwise.launch.hosts.ray_node import NodeSpec
from rankwise.launch.hosts.ssh import passed_on, working_folder
from rankwise.launch.messages import EndJob, ReportFailure, RequestStop, ShowText
from rankwise.launch.rendezvous import ANY_PORT
from rankwise.launch.report import failure_report
from rankwise.store import wire
from rankwise.version import VERSION
from rankwise.world.device.kinds import PASSED_ON

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rankwise.launch.controller.link import LocalLink
    from rankwise.launch.function.call import CallerContext
    from rankwise.launch.hosts.ray_cluster import RayNeeds
    from rankwise.launch.hosts.ray_node import Chunk
    from rankwise.launch.report.failure import FailedAttempt
    from rankwise.launch.report.failure_report import Reporter

Answers = list[tuple[dict[str, Any], bytes | None]]
"""Messages of a node's launcher and ranks, as headers and bodies."""

CONCLUDE_SECONDS = 20.0
"""How long the nodes may take to end once the job is over, or once they were told to."""
START_SECONDS = 1.0
"""Between two starts of a node, at least."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RayEnd:
    """How a job has ended."""

    exit_code: int
    answers: Answers


def launch_on_ray(
    context: CallerContext, call: bytes, needs: RayNeeds, reporter: Reporter, *, takes_signals: bool
) -> RayEnd:
    """Run a script's or a function's ranks on a cluster of Ray, to their end.

    Args:
        context: what the ranks run; its options have the number of all ranks.
        call: the function's call, pickled.
        needs: the cluster, and what to reserve there.
        reporter: shows the reports.
        takes_signals: whether this process's signals are the job's; else only Ctrl-C, as an exception.

    Raises:
        ConfigurationError: Ray is not installed, no cluster answers, it is too small, or a node refuses the job.
        LaunchError: Ray cannot place the job, or rankwise does not run on a node, or one is lost before ranks start.
        KeyboardInterrupt: Ctrl-C; the job has ended.
    """
    options = context.options
    if takes_signals:
        end_quietly()
    with ExitStack() as closing:
        ray = connect(needs.address, closing)
        signals = PendingSignals() if takes_signals else None
        on_nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        per_rank = needs_of_rank(on_nodes, needs, options)
        counts = ranks_of_nodes(on_nodes, per_rank, options.num_ranks, needs.nodes)
        group = Reservation(ray, counts, per_rank, is_spread=needs.nodes is not None)
        closing.callback(group.give_back)
        received = group.wait(options.rendezvous_timeout_seconds, reporter.show, signals)
        if received is not None:
            return RayEnd(exit_code=128 + received, answers=[])
        nodes = (needs.nodes[0] if needs.nodes else len(counts), len(counts))
        server, coordinator, spec = _serve(ray, context, nodes, needs)
        closing.callback(server.close)
        job = _RayJob(
            group,
            spec,
            call,
            link=server.watch(),
            has_begun=lambda: coordinator.attempt is not None,
            reporter=reporter,
            signals=signals,
        )
        closing.callback(job.close)
        return job.follow()


def _serve(
    ray: Any, context: CallerContext, nodes: tuple[int, int], needs: RayNeeds
) -> tuple[JobServer, Coordinator, NodeSpec]:
    """Serve the job on this machine, and return what its nodes run; each has its own number of ranks."""
    host = str(ray.util.get_node_ip_address())
    listener = wire.listen(host, ANY_PORT)
    address = (host, int(listener.getsockname()[1]))
    options = replace(context.options, nodes=nodes, rendezvous=address, served_elsewhere=True)
    coordinator = Coordinator(
        nodes=nodes,
        max_restarts=options.max_restarts,
        rendezvous=f"{host}:{address[1]}",
        timeout_seconds=options.rendezvous_timeout_seconds,
        now=time.monotonic(),
        run_id=secrets.token_hex(8),
        is_watched=True,
    )
    secret = draw_secret()
    stores = TorchStores(host, host, options.torch_store, on_one_machine=False)
    variables = {name: value for name, value in passed_on(os.environ).items() if name not in PASSED_ON}
    is_copied = "working_dir" in ray.get_runtime_context().runtime_env
    spec = NodeSpec(
        rankwise=VERSION,
        context=replace(context, options=options),
        folder=None if is_copied else working_folder(),
        secret=secret,
        # Ray sets it for all CPUs of an actor, which here are those of several ranks.
        variables={**variables, "OMP_NUM_THREADS": str(needs.cpus_per_rank)},
    )
    return JobServer(listener, secret.encode(), coordinator, stores), coordinator, spec


# -- until the end -------------------------------------------------------------------------------------


class _RayJob:
    """The nodes of a job, each followed by a thread, from their start to the end of the last."""

    def __init__(
        self,
        group: Reservation,
        spec: NodeSpec,
        call: bytes,
        *,
        link: LocalLink,
        has_begun: Callable[[], bool],
        reporter: Reporter,
        signals: PendingSignals | None,
    ) -> None:
        """``has_begun``: whether all nodes have joined, so that the coordinator handles the loss of one."""
        self._group = group
        self._spec = spec
        self._call = group.ray.put(call)
        self._reporter = reporter
        self._signals = signals
        self._link = link
        self._has_begun = has_begun
        self._news: deque[Callable[[], None]] = deque()
        self._reader, self._writer = os.pipe()
        self._actors: dict[int, Any] = {}
        self._not_ended = set(range(len(group.counts)))
        self._started: set[int] = set()
        """The nodes whose launchers have said something."""
        self._shown_lost: set[int] = set()
        """The nodes whose loss was shown, and that have said nothing since."""
        self._muted: set[int] = set()
        """The streams whose reader has closed them."""
        self._answers: Answers = []
        self._report: FailedAttempt | None = None
        """The report of a failure that is shown last, or before a restart."""
        self._exit_code: int | None = None
        self._deadline: float | None = None
        self._signal: signal.Signals | None = None
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=self._follow_node, args=(number,), name="rankwise-ray", daemon=True)
            for number in sorted(self._not_ended)
        ]
        for thread in self._threads:
            thread.start()

    def follow(self) -> RayEnd:
        """Return how the job has ended; raises what a node or Ray raised before."""
        is_interrupted = False
        while self._not_ended and (self._deadline is None or time.monotonic() < self._deadline):
            try:
                self._turn()
            except KeyboardInterrupt:
                is_interrupted = True
                self._pass_on(signal.SIGINT)
            except BrokenPipeError:
                self._hang_up()
        self._show_report()
        if is_interrupted:
            raise KeyboardInterrupt
        code = self._exit_code
        if code is None:
            codes = [header["exit_code"] for header, _ in self._answers if header["kind"] == "ended"]
            code = next(filter(None, codes), 1) if self._signal is None else 128 + self._signal
        return RayEnd(exit_code=code, answers=self._answers)

    def close(self) -> None:
        """End all actors, and with them whatever still runs on the nodes."""
        self._closed.set()
        # A copy: a node's thread may add one.
        for actor in list(self._actors.values()):
            self._group.ray.kill(actor)
        self._link.close()
        deadline = time.monotonic() + CONCLUDE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):
            os.close(self._reader)
            os.close(self._writer)

    def _turn(self) -> None:
        sources = [self._link.fileno(), self._reader, *([self._signals.fileno()] if self._signals else [])]
        left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        readable, _, _ = select.select(sources, [], [], left)
        if self._signals is not None and self._signals.fileno() in readable:
            self._pass_on(self._signals.next_received())
        if self._reader in readable:
            os.read(self._reader, 1)
            self._news.popleft()()
        for message in self._link.receive() if self._link.fileno() in readable else ():
            match message:
                case ShowText():
                    self._show_report()
                    self._reporter.show(message.text)
                case ReportFailure():
                    self._report = message.failed
                case EndJob():
                    self._end(message)
                case _:
                    pass

    def _show_report(self) -> None:
        failed, self._report = self._report, None
        if failed is not None:
            advises = not self._spec.context.options.controller  # which has a script for one device
            self._reporter.report(failed, failure_report.whole(failed, advises=advises))

    def _end(self, message: EndJob) -> None:
        self._exit_code = message.exit_code
        # A node that Ray has not replaced yet no longer matters.
        self._not_ended &= self._started
        self._deadline = time.monotonic() + CONCLUDE_SECONDS
        if message.what:
            error = LaunchError(message.what, evidence=message.evidence or None, do=message.advice or None)
            self._reporter.show(f"[rankwise] {error}\n")

    def _pass_on(self, number: signal.Signals) -> None:
        if number == signal.SIGUSR2:
            self._link.send(RequestStop(reason=number.name))
            return
        # A second one does not wait.
        self._deadline = time.monotonic() + (CONCLUDE_SECONDS if self._signal is None else 0.0)
        self._signal = number
        for actor in list(self._actors.values()):
            actor.signal.remote(number.name)

    def _hang_up(self) -> None:
        """End the job: the reader of a stream has closed it. A signal before has perhaps ended the reader too."""
        if self._signal is None:
            self._pass_on(signal.SIGHUP)

    # -- in the thread of a node -------------------------------------------------------------------

    def _follow_node(self, number: int) -> None:
        exceptions: Any = importlib.import_module("ray.exceptions")
        while not self._closed.is_set():
            began = time.monotonic()
            answers: Answers = []
            why = "its launcher has exited"
            try:
                answers = self._run_node(number)
            except exceptions.RayTaskError as error:
                self._post(lambda cause=error.cause or error: _raise(cause))
                return
            # The actor, its process or the node has died, or Ray has killed it for the memory of others.
            except exceptions.RayError as error:
                why = str(error).partition("\n")[0]
                if getattr(error, "actor_init_failed", False) and not self._closed.is_set():
                    self._post(lambda text=str(error): _raise(_not_installed(text)))
                    return
            except Exception as error:  # noqa: BLE001 - whatever it is, the other thread must not wait
                self._post(lambda error=error: _raise(error))
                return
            has_ended = any(header["kind"] in {"ended", "refused"} for header, _ in answers)
            if not has_ended:
                self._post(lambda why=why: self._note_loss(number, why))
            if has_ended or self._deadline is not None or not self._spec.context.options.can_restart:
                self._post(lambda answers=answers: self._note_end(number, answers))
                return
            # It may be alive, behind a broken network.
            self._group.ray.kill(self._actors[number])
            self._closed.wait(max(0.0, began + START_SECONDS - time.monotonic()))

    def _run_node(self, number: int) -> Answers:
        ray = self._group.ray
        options = replace(self._spec.context.options, num_ranks=self._group.counts[number], node_rank=number)
        spec = replace(self._spec, context=replace(self._spec.context, options=options))
        actor = self._actors[number] = self._group.actor(number)
        ended = actor.run.remote(spec, self._call)
        while chunks := ray.get(actor.read.remote()):
            self._post(lambda chunks=chunks: self._show(number, chunks))
        return ray.get(ended)

    def _post(self, action: Callable[[], None]) -> None:
        """Have the main thread run an action."""
        self._news.append(action)
        os.write(self._writer, b"!")

    # -- in the main thread again ------------------------------------------------------------------

    def _show(self, number: int, chunks: Sequence[Chunk]) -> None:
        self._started.add(number)
        self._shown_lost.discard(number)
        for descriptor, text in chunks:
            if descriptor in self._muted:
                continue
            stream = sys.stdout if descriptor == STDOUT else sys.stderr
            try:
                stream.write(text)
                stream.flush()
            except BrokenPipeError:
                self._muted.add(descriptor)
                self._hang_up()

    def _note_loss(self, number: int, why: str) -> None:
        has_started = number in self._started
        self._started.discard(number)
        if self._deadline is not None and not has_started:
            return  # it no longer matters
        can_restart = self._spec.context.options.can_restart
        if self._deadline is None and not can_restart and not self._has_begun():
            # The other nodes would wait for it.
            raise LaunchError(
                f"Ray has lost node {number} before the ranks started.",
                evidence=why,
                do="check with `ray status` and `ray logs` whether its memory was full; with --max-restarts 3 "
                "a lost node is started again",
            )
        if number not in self._shown_lost:
            self._shown_lost.add(number)
            again = ", and starts it again" if can_restart else ""
            self._reporter.show(f"[rankwise] Ray has lost node {number}{again}: {why}\n")

    def _note_end(self, number: int, answers: Answers) -> None:
        self._not_ended.discard(number)
        self._answers += answers
        for header, body in answers:
            if header["kind"] == "refused" and self._exit_code is None:
                with contextlib.closing(message_of(header, body)) as message:
                    _raise(refusal(message.read()))


def _raise(error: BaseException) -> None:
    raise error


def _not_installed(text: str) -> LaunchError:
    return LaunchError(
        "rankwise does not start on a node of the cluster.",
        evidence=text,
        do=f"install rankwise=={VERSION} on every node, or have Ray install it: ray job submit "
        f"""--runtime-env-json '{{"pip": ["rankwise=={VERSION}"]}}' ...""",
    )
