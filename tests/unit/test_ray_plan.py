# SPDX-License-Identifier: Apache-2.0
"""What a job on Ray asks of a cluster, as values, and what is refused before Ray is asked; the rest needs a cluster."""

from __future__ import annotations

import sys

import pytest
from coordinated import TIMEOUT_SECONDS, Scene, text_to

from rankwise.cli import main
from rankwise.errors import ConfigurationError
from rankwise.launch.controller.coordinator import RETURN_SECONDS, WATCHER, Phase
from rankwise.launch.function.launch import launch
from rankwise.launch.hosts.ray_cluster import ranks_of_nodes
from rankwise.launch.messages import EndJob, Node
from rankwise.launch.options import LaunchOptions
from rankwise.launch.rendezvous import find

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
