# SPDX-License-Identifier: Apache-2.0
"""``--ray`` and ``launch(on="ray")``: starts a job's nodes on a cluster of Ray, and replaces those that are lost.

This process, a driver of Ray, serves the job and runs no rank. Ray reserves the resources as a placement group, with
an actor in each of its bundles. Ray is imported when a job starts. Imported by the command line and by the launch of
a function.

Source: https://docs.ray.io/en/latest/ray-core/scheduling/placement-group.html, and "Fault tolerance" there: the bundles
of a lost node are placed on another one.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import secrets
import select
import signal
import socket
import sys
import threading
import time
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rankwise.errors import ConfigurationError, LaunchError
from rankwise.launch.agent.signals import PendingSignals
from rankwise.launch.auth import draw_secret
from rankwise.launch.controller.coordinator import Coordinator
from rankwise.launch.controller.server import JobServer, TorchStores
from rankwise.launch.function.call import message_of, refusal
from rankwise.launch.hosts.ray_node import NodeSpec, RayNode
from rankwise.launch.hosts.ssh import passed_on, working_folder
from rankwise.launch.messages import EndJob, ReportFailure, RequestStop, ShowText
from rankwise.launch.rendezvous import ANY_PORT
from rankwise.launch.report import failure_report
from rankwise.store import wire
from rankwise.version import VERSION
from rankwise.world.device.kinds import PASSED_ON

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rankwise.launch.controller.link import LocalLink
    from rankwise.launch.function.call import CallerContext
    from rankwise.launch.hosts.ray_node import Chunk
    from rankwise.launch.options import LaunchOptions
    from rankwise.launch.report.failure_report import Reporter

Answers = list[tuple[dict[str, Any], bytes | None]]
"""Messages of a node's launcher and ranks, as headers and bodies."""

ANY_CLUSTER = "auto"
CONNECT_SECONDS = 5.0
"""How long the address of a cluster may take to answer."""
NOTICE_SECONDS = 5.0
"""After how long a wait for Ray's resources is logged."""
CONCLUDE_SECONDS = 20.0
"""How long the nodes may take to end once the job is over, or once they were told to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RayNeeds:
    """What a job needs of a cluster."""

    address: str = ANY_CLUSTER
    """``host:port``, or ``auto``: the cluster that this machine belongs to."""
    nodes: tuple[int, int] | None = None
    """The fewest and the most nodes; ``None``: as few as hold the ranks."""
    cpus_per_rank: int = 1


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
        LaunchError: Ray cannot place the job, or rankwise does not run on a node.
        KeyboardInterrupt: Ctrl-C; the job has ended.
    """
    options = context.options
    with ExitStack() as closing:
        ray = _connect(needs.address, closing)
        signals = PendingSignals() if takes_signals else None
        on_nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        per_rank = _per_rank(on_nodes, needs, options)
        counts = ranks_of_nodes(on_nodes, per_rank, options.num_ranks, needs.nodes)
        group = _Reservation(ray, counts, per_rank, is_spread=needs.nodes is not None)
        closing.callback(group.give_back)
        if not group.wait(options.rendezvous_timeout_seconds, reporter.show, signals):
            return RayEnd(exit_code=128 + signal.SIGINT, answers=[])
        nodes = (needs.nodes[0] if needs.nodes else len(counts), len(counts))
        server, spec = _serve(ray, context, nodes, needs)
        closing.callback(server.close)
        job = _RayJob(group, spec, call, link=server.watch(), reporter=reporter, signals=signals)
        closing.callback(job.close)
        return job.follow()


# -- values --------------------------------------------------------------------------------------------


def ranks_of_nodes(
    on_nodes: Sequence[Mapping[str, float]],
    per_rank: Mapping[str, float],
    num_ranks: int | None,
    nodes: tuple[int, int] | None,
) -> list[int]:
    """Return how many ranks each node runs.

    Args:
        on_nodes: the resources of each node of the cluster.
        per_rank: what a rank needs of them.
        num_ranks: of the job; ``None``: one per GPU that the cluster has CPUs for, or one.
        nodes: as in :class:`RayNeeds`.

    Raises:
        ConfigurationError: there are more ranks than the cluster holds, or fewer than nodes.
    """
    room = sorted((_room(resources, per_rank) for resources in on_nodes), reverse=True)
    wanted = num_ranks or max(1, sum(room) if "GPU" in per_rank else 1)
    if nodes is not None:
        # The cluster may grow for them.
        if wanted < nodes[1]:
            raise ConfigurationError(
                f"{wanted} ranks cannot be divided among {nodes[1]} nodes.", do=f"pass -n {nodes[1]} or more"
            )
        return [wanted // nodes[1] + (number < wanted % nodes[1]) for number in range(nodes[1])]
    if wanted > sum(room):
        of_ranks = ", ".join(f"{amount:g} {name}" for name, amount in per_rank.items())
        raise ConfigurationError(
            f"{wanted} ranks with {of_ranks} each were requested, but this cluster of Ray holds {sum(room)}.",
            evidence="\n".join(_described(resources, per_rank) for resources in on_nodes),
            do=f"pass {f'-n {sum(room)}' if sum(room) else 'less per rank'}, or add nodes (ray start); "
            "if the cluster grows on demand, pass the number of nodes to wait for: --nodes 2"
            + ("; --device cpu runs the ranks without GPUs" if "GPU" in per_rank else ""),
        )
    counts: list[int] = []
    for most in room:
        counts.append(min(most, wanted - sum(counts)))
    return [count for count in counts if count]


def _room(resources: Mapping[str, float], per_rank: Mapping[str, float]) -> int:
    return min(int(resources.get(name, 0.0) // amount) for name, amount in per_rank.items())


def _described(resources: Mapping[str, float], per_rank: Mapping[str, float]) -> str:
    address = next((name[5:] for name in resources if name.startswith("node:") and "__" not in name), "a node")
    has = ", ".join(f"{resources.get(name, 0.0):g} {name}" for name in per_rank)
    return f"{address} has {has}: {_room(resources, per_rank)} ranks"


def _per_rank(on_nodes: Sequence[Mapping[str, float]], needs: RayNeeds, options: LaunchOptions) -> dict[str, float]:
    has_gpus = options.device != "cpu" and any(resources.get("GPU", 0) >= 1 for resources in on_nodes)
    return {"CPU": float(needs.cpus_per_rank), **({"GPU": 1.0} if has_gpus else {})}


# -- the beginning -------------------------------------------------------------------------------------


def _connect(address: str, closing: ExitStack) -> Any:
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError as error:
        raise ConfigurationError(
            "Ray is not installed here.", evidence=str(error), do="pip install 'rankwise[ray]'"
        ) from None
    if ray.is_initialized():
        return ray
    host, colon, port = address.rpartition(":")
    if "://" in address:
        raise ConfigurationError(
            f"{address} is the address of a Ray client, which the nodes cannot reach.",
            do="run this on a machine of the cluster, or submit it: ray job submit --address http://HOST:8265 "
            "--working-dir . -- rankwise run --ray ...",
        )
    try:
        if colon:
            socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
        ray.init(address=address, log_to_driver=False, logging_level="WARNING")
    except (OSError, ValueError) as error:
        where = "on this machine" if address == ANY_CLUSTER else f"at {address}"
        raise ConfigurationError(
            f"No cluster of Ray answers {where}.",
            evidence=str(error),
            do="start one: ray start --head; on the other machines: ray start --address=HOST:6379. Or pass the address "
            "of a running one: --ray=HOST:6379",
        ) from None
    closing.callback(ray.shutdown)
    return ray


class _Reservation:
    """The resources of the job's nodes: a placement group, from its request to its end."""

    def __init__(self, ray: Any, counts: Sequence[int], per_rank: Mapping[str, float], *, is_spread: bool) -> None:
        self.ray = ray
        self.counts = counts
        self._util: Any = importlib.import_module("ray.util")
        self._strategies: Any = importlib.import_module("ray.util.scheduling_strategies")
        self.bundles = [{name: amount * count for name, amount in per_rank.items()} for count in counts]
        strategy = "STRICT_SPREAD" if is_spread else "PACK"
        self._group = self._util.placement_group(self.bundles, strategy=strategy)

    def wait(self, seconds: float, show: Callable[[str], None], signals: PendingSignals | None) -> bool:
        """Wait for Ray to reserve them; return whether it has, and no signal was received.

        Raises:
            LaunchError: it did not within ``seconds``.
        """
        started, has_said = time.monotonic(), False
        words = "; ".join(", ".join(f"{amount:g} {name}" for name, amount in bundle.items()) for bundle in self.bundles)
        while not self._group.wait(1):
            waited = time.monotonic() - started
            if signals is not None and select.select([signals.fileno()], [], [], 0)[0]:
                return False
            if waited > seconds:
                raise LaunchError(
                    f"Ray did not reserve {words} within {seconds:.0f} s.",
                    evidence=f"free in the cluster: {self.ray.available_resources()}",
                    do="see what uses the cluster with `ray status`, or pass fewer ranks",
                )
            if waited > NOTICE_SECONDS and not has_said:
                has_said = True
                show(f"[rankwise] waiting for Ray to reserve {words}\n")
        return True

    def actor(self, number: int) -> Any:
        """Return a new actor in a bundle, on the node where Ray has it now."""
        bundle = self.bundles[number]
        strategy = self._strategies.PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=number
        )
        remote = self.ray.remote(RayNode).options(
            num_cpus=bundle["CPU"], num_gpus=bundle.get("GPU", 0), max_concurrency=4, scheduling_strategy=strategy
        )
        return remote.remote()

    def give_back(self) -> None:
        """Give everything back to the cluster; actors in it are ended."""
        self._util.remove_placement_group(self._group)


def _serve(ray: Any, context: CallerContext, nodes: tuple[int, int], needs: RayNeeds) -> tuple[JobServer, NodeSpec]:
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
    return JobServer(listener, secret.encode(), coordinator, stores), spec


# -- until the end -------------------------------------------------------------------------------------


class _RayJob:
    """The nodes of a job, each followed by a thread, from their start to the end of the last."""

    def __init__(
        self,
        group: _Reservation,
        spec: NodeSpec,
        call: bytes,
        *,
        link: LocalLink,
        reporter: Reporter,
        signals: PendingSignals | None,
    ) -> None:
        self._group = group
        self._spec = spec
        self._call = group.ray.put(call)
        self._reporter = reporter
        self._signals = signals
        self._link = link
        self._news: deque[Callable[[], None]] = deque()
        self._reader, self._writer = os.pipe()
        self._actors: dict[int, Any] = {}
        self._not_ended = set(range(len(group.counts)))
        self._answers: Answers = []
        self._exit_code: int | None = None
        self._deadline: float | None = None
        self._signal: signal.Signals | None = None
        self._is_closed = False
        for number in sorted(self._not_ended):
            threading.Thread(target=self._follow_node, args=(number,), name="rankwise-ray", daemon=True).start()

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
                self._pass_on(signal.SIGHUP)
        if is_interrupted:
            raise KeyboardInterrupt
        code = self._exit_code
        if code is None:
            codes = [header["exit_code"] for header, _ in self._answers if header["kind"] == "ended"]
            code = next(filter(None, codes), 1) if self._signal is None else 128 + self._signal
        return RayEnd(exit_code=code, answers=self._answers)

    def close(self) -> None:
        """End all actors, and with them whatever still runs on the nodes."""
        self._is_closed = True
        for actor in self._actors.values():
            self._group.ray.kill(actor)
        self._link.close()

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
                    self._reporter.show(message.text)
                case ReportFailure():
                    self._reporter.report(message.failed, failure_report.whole(message.failed))
                case EndJob():
                    self._end(message)
                case _:
                    pass

    def _end(self, message: EndJob) -> None:
        self._exit_code = message.exit_code
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
        for actor in self._actors.values():
            actor.signal.remote(number.name)

    # -- in the thread of a node -------------------------------------------------------------------

    def _follow_node(self, number: int) -> None:
        exceptions: Any = importlib.import_module("ray.exceptions")
        while not self._is_closed:
            try:
                answers = self._run_node(number)
                self._post(lambda answers=answers: self._note_end(number, answers))
            except exceptions.RayActorError as error:
                if self._is_closed:
                    return
                if error.actor_init_failed:
                    self._post(lambda text=str(error): _raise(_not_installed(text)))
                elif self._spec.context.options.can_restart:
                    self._post(lambda: self._reporter.show(f"[rankwise] Ray lost node {number}; it starts another\n"))
                    continue
                else:
                    self._post(lambda: self._note_end(number, []))
            except exceptions.RayTaskError as error:
                self._post(lambda cause=error.cause: _raise(cause))
            except Exception as error:  # noqa: BLE001 - whatever it is, the other thread must not wait
                self._post(lambda error=error: _raise(error))
            return

    def _run_node(self, number: int) -> Answers:
        ray = self._group.ray
        options = replace(self._spec.context.options, num_ranks=self._group.counts[number], node_rank=number)
        spec = replace(self._spec, context=replace(self._spec.context, options=options))
        actor = self._actors[number] = self._group.actor(number)
        ended = actor.run.remote(spec, self._call)
        while chunks := ray.get(actor.read.remote()):
            self._post(lambda chunks=chunks: _show(chunks))
        return ray.get(ended)

    def _post(self, action: Callable[[], None]) -> None:
        """Have the main thread run an action."""
        self._news.append(action)
        os.write(self._writer, b"!")

    def _note_end(self, number: int, answers: Answers) -> None:
        self._not_ended.discard(number)
        self._answers += answers
        for header, body in answers:
            if header["kind"] == "refused":
                with contextlib.closing(message_of(header, body)) as message:
                    _raise(refusal(message.read()))


def _show(chunks: Sequence[Chunk]) -> None:
    for number, text in chunks:
        stream = sys.stdout if number == 1 else sys.stderr
        stream.write(text)
        stream.flush()


def _raise(error: BaseException) -> None:
    raise error


def _not_installed(text: str) -> LaunchError:
    return LaunchError(
        "rankwise does not start on a node of the cluster.",
        evidence=text,
        do=f"install rankwise=={VERSION} on every node, or have Ray install it: ray job submit "
        f"""--runtime-env-json '{{"pip": ["rankwise=={VERSION}"]}}' ...""",
    )
