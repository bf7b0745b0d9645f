# SPDX-License-Identifier: Apache-2.0
"""What a job on Ray asks of a cluster, as values, and what is refused before Ray is asked; the rest needs a cluster."""

from __future__ import annotations

import signal
import sys
import time
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from coordinated import TIMEOUT_SECONDS, Scene, text_to

from rankwise.cli import main
from rankwise.errors import ConfigurationError, LaunchError
from rankwise.launch.agent.output import STDERR, STDOUT
from rankwise.launch.agent.signals import HANDLED
from rankwise.launch.controller.coordinator import RETURN_SECONDS, WATCHER, Phase
from rankwise.launch.controller.link import LocalLink
from rankwise.launch.function.call import CallerContext
from rankwise.launch.function.launch import launch
from rankwise.launch.hosts import on_ray
from rankwise.launch.hosts.ray_cluster import ranks_of_nodes
from rankwise.launch.hosts.ray_node import NodeSpec
from rankwise.launch.messages import EndJob, Node
from rankwise.launch.options import LaunchOptions
from rankwise.launch.rendezvous import find

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CPU = {"CPU": 1.0}
GPU = {"CPU": 4.0, "GPU": 1.0}
NODES = ({"CPU": 2.0, "node:10.0.0.1": 1.0}, {"CPU": 8.0, "GPU": 4.0, "node:10.0.0.2": 1.0}, {"memory": 1e9})


@pytest.mark.parametrize(
    ("per_rank", "num_ranks", "nodes", "expected"),
    [
        (CPU, 3, None, [3]),
        (CPU, 9, None, [8, 1]),
        (CPU, None, None, [1]),
        ({"CPU": 1.0, "GPU": 1.0}, None, None, [4]),
        # Four GPUs are there, but CPUs for two ranks only.
        (GPU, None, None, [2]),
        # A cluster that grows holds them later.
        (CPU, 16, (2, 2), [8, 8]),
        (CPU, 5, (1, 3), [2, 2, 1]),
    ],
)
def test_ranks_are_put_on_as_few_nodes_as_hold_them(
    per_rank: dict[str, float], num_ranks: int | None, nodes: tuple[int, int] | None, expected: list[int]
) -> None:
    assert ranks_of_nodes(NODES, per_rank, num_ranks, nodes) == expected


def test_more_ranks_than_the_cluster_holds_are_an_error_that_shows_each_node() -> None:
    with pytest.raises(ConfigurationError) as refused:
        ranks_of_nodes(NODES, CPU, 16, None)
    assert refused.value.what == "16 ranks with 1 CPU each were requested, but this cluster of Ray holds 10."
    lines = (refused.value.evidence or "").splitlines()
    assert lines == ["10.0.0.1 has 2 CPU: 2 ranks", "10.0.0.2 has 8 CPU: 8 ranks", "a node has 0 CPU: 0 ranks"]
    assert (refused.value.do or "").startswith("pass -n 10, or add nodes")
    with pytest.raises(ConfigurationError, match="3 ranks cannot be divided among 4 nodes"):
        ranks_of_nodes(NODES, CPU, 3, (4, 4))


@pytest.fixture
def own_signals() -> Iterator[None]:
    """Put back the handlers of signals, which the command takes over for the rest of its process."""
    before = {number: signal.getsignal(number) for number in HANDLED}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("own_signals")
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--ray"], "before a script, write --ray=auto"),
        (["--cpus-per-rank", "2"], "--cpus-per-rank is for --ray"),
        (["--ray=auto", "--node-rank", "1"], "--ray is one command for all"),
        (["--ray=auto", "--hosts", "a,b"], "pass one of them"),
        (["--ray=auto", "--nodes", "3:2"], "nodes must be N, or MIN:MAX"),
        (["--ray=auto"], "Ray is not installed here"),
        (["--ray=ray://head:10001"], "Ray is not installed here"),
    ],
)
def test_a_command_that_cannot_be_is_refused_at_once(
    words: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SystemExit) as ended:
        sys.exit(main(["run", *words, __file__]))
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"on": "slurm"}, 'on must be "here" or "ray"'),
        ({"cpus_per_rank": 2}, "cpus_per_rank is for Ray"),
        ({"on": "ray", "cpus_per_rank": 0}, "cpus_per_rank must be >= 1"),
        ({"on": "ray", "rendezvous": "a:1"}, 'on="ray" is one call for all'),
    ],
)
def test_a_call_that_cannot_be_is_refused_at_once(arguments: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        launch(print, **arguments)


def test_a_node_of_a_job_that_is_served_elsewhere_never_serves_it() -> None:
    options = LaunchOptions(nodes=(2, 2), node_rank=0, rendezvous=("127.0.0.1", 1), served_elsewhere=True)
    assert find(options).listener is None


def test_a_job_whose_driver_replaces_nodes_waits_for_one_when_the_last_is_lost() -> None:
    scene = Scene((1, 1), max_restarts=1, is_watched=True)
    scene.node_joined("a")
    scene.coordinator.node_lost("a", scene.now, "was lost")
    scene.sent()
    assert "a was lost" in text_to(WATCHER, scene)
    assert scene.coordinator.phase is Phase.GATHERING
    # Ray may start a machine first.
    scene.now += RETURN_SECONDS + 1
    scene.coordinator.tick(scene.now)
    scene.coordinator.node_joined(Node(node_id="b", hostname="b", num_ranks=2), scene.now)
    assert scene.starts() == {"b": (1, 0, 2)}


def test_the_driver_receives_the_end_of_a_job_that_no_machine_is_left_in() -> None:
    scene = Scene((1, 1), is_watched=True)
    scene.node_joined("a")
    scene.coordinator.node_lost("a", scene.now + TIMEOUT_SECONDS, "was lost")
    ends = scene.sent(EndJob)
    assert [to for to, _ in ends] == [WATCHER]
    assert ends[0][1].exit_code != 0


# -- with a cluster that does what a test says ---------------------------------------------------------


class Remote:
    """A method of an actor."""

    def __init__(self, method: Callable[..., object]) -> None:
        self.remote = method


class NodeLost(Exception):
    """Ray has lost an actor, as ``ray.exceptions.RayError``."""


class Cluster:
    """In place of a reservation and of Ray: each node gives chunks of output, and then is lost."""

    def __init__(self, *chunks: list[tuple[int, str]], most_starts: int = 1) -> None:
        self.ray = self
        self.counts = [1]
        self.starts: list[float] = []
        self.signals: list[str] = []
        self._chunks = chunks
        self._most_starts = most_starts

    def put(self, call: bytes) -> bytes:
        return call

    def get(self, value: Iterator[list[tuple[int, str]]] | None) -> object:
        """Return the next chunks of a node, or raise."""
        chunks = None if value is None else next(value, None)
        if chunks is not None:
            return chunks
        if len(self.starts) > self._most_starts:
            raise LaunchError("The test is over.")
        raise NodeLost("killed for its memory\nmore")

    def kill(self, _actor: object) -> None:
        """Do nothing."""

    def actor(self, _number: int) -> SimpleNamespace:
        self.starts.append(time.monotonic())
        left = iter(self._chunks)
        run, read = Remote(lambda _spec, _call: None), Remote(lambda: left)
        return SimpleNamespace(run=run, read=read, signal=Remote(self.signals.append))


class Shown:
    """A reporter, and what it was given."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def show(self, text: str) -> None:
        self.texts.append(text)


def job_on(
    cluster: Cluster, shown: Shown, monkeypatch: pytest.MonkeyPatch, *, max_restarts: int = 0, has_begun: bool = False
) -> on_ray._RayJob:
    exceptions = SimpleNamespace(RayError=NodeLost, RayTaskError=ZeroDivisionError)
    monkeypatch.setitem(sys.modules, "ray.exceptions", exceptions)  # type: ignore[arg-type]
    options = LaunchOptions(max_restarts=max_restarts)
    context = CallerContext(name="", options=options, names=frozenset(), argv=[], path=[], sources={})
    spec = NodeSpec(rankwise="", context=context, folder=None, secret="", variables={})
    link = LocalLink(lambda _message: None, lambda: link.release())  # noqa: PLW0108 - there is none yet
    group: Any = cluster
    reporter: Any = shown
    return on_ray._RayJob(group, spec, b"", link=link, has_begun=lambda: has_begun, reporter=reporter, signals=None)


def test_a_node_that_is_lost_before_the_ranks_start_ends_the_job_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = job_on(Cluster(), Shown(), monkeypatch)
    with pytest.raises(LaunchError) as lost:
        job.follow()
    job.close()
    assert lost.value.what == "Ray has lost node 0 before the ranks started."
    assert lost.value.evidence == "killed for its memory"


def test_a_node_without_output_that_is_lost_later_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Shown()
    job = job_on(Cluster(), shown, monkeypatch, has_begun=True)
    assert job.follow().exit_code == 1
    job.close()
    assert shown.texts == ["[rankwise] Ray has lost node 0: killed for its memory\n"]


def test_a_node_that_is_lost_at_each_start_is_shown_once_and_started_at_a_limited_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(on_ray, "START_SECONDS", 0.1)
    shown, cluster = Shown(), Cluster(most_starts=3)
    job = job_on(cluster, shown, monkeypatch, max_restarts=1)
    with pytest.raises(LaunchError, match="The test is over"):
        job.follow()
    job.close()
    assert shown.texts == ["[rankwise] Ray has lost node 0, and starts it again: killed for its memory\n"]
    assert all(later - earlier >= 0.09 for earlier, later in pairwise(cluster.starts))


class Closed:
    """A stream that nothing reads."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        raise BrokenPipeError


def test_a_closed_stdout_ends_the_job_once_and_the_rest_of_the_output_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = Cluster([(STDOUT, "one")], [(STDOUT, "two"), (STDERR, "why")], [(STDOUT, "three")])
    job = job_on(cluster, Shown(), monkeypatch, has_begun=True)
    monkeypatch.setattr(sys, "stdout", Closed())
    end = job.follow()
    job.close()
    assert cluster.signals == ["SIGHUP"]
    assert end.exit_code == 128 + signal.SIGHUP
    assert capsys.readouterr().err == "why"
