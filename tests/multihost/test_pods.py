# SPDX-License-Identifier: Apache-2.0
"""The commands of the manifests that ``rankwise submit --kubernetes`` writes, as processes on two hosts.

No registry has the parts of a cluster, so the variables of a pod are those that the controllers are documented to set.
An eviction is what the kubelet does: SIGTERM to the pod's first process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import interrupted
import pytest
from hosts import HOSTS_FILES, Hosts
from interrupted import check_resumed
from launched_job import Job

from rankwise.launch.kubernetes import INDEX, KubernetesOptions, manifests

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.warm import WarmPython

INTERRUPTED = Path(interrupted.__file__)
STOPPED = 75
NOBODY = "198.18.0.9"
"""An address that no host has."""
CANNOT_SAVE = """
import time
import rankwise as rw
with rw.join() as world:
    rw.barrier()
    if world.rank == 0:
        print("begun", flush=True)
    while True:
        time.sleep(0.05)
"""

REPORTS = """
from pathlib import Path
import rankwise as rw
with rw.join() as world:
    rw.barrier()
    Path(f"{world.rank} of {world.world_size}").touch()
"""


@pytest.fixture(scope="module")
def hosts(warm_python: WarmPython) -> Iterator[Hosts]:
    with Hosts(2, python=warm_python) as made:
        yield made


def container_of(job: dict[str, Any]) -> dict[str, Any]:
    """Return the command and the variables of each pod of a job."""
    spec = job["spec"]
    if job["kind"] == "TrainJob":
        return spec["trainer"]
    if job["kind"] == "JobSet":
        spec = spec["replicatedJobs"][0]["template"]["spec"]
    return spec["template"]["spec"]["containers"][0]


def controller_variables(kind: str, index: int, nodes: int, first_pod: str) -> dict[str, str]:
    """Return the variables that the controllers set in a pod."""
    variables = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "JOB_COMPLETION_INDEX": str(index)}
    if kind == "trainjob":
        numbers = {"NNODES": str(nodes), "NPROC_PER_NODE": "auto", "NODE_RANK": str(index)}
        numbers |= {"MASTER_ADDR": first_pod, "MASTER_PORT": "29400"}
        variables |= {f"PET_{name}": value for name, value in numbers.items()}
    return variables


class Pods(Job):
    """The pods of a job, one per host, each of which runs the command of its manifest."""

    def __init__(self, hosts: Hosts, folder: Path, kind: str, target: list[str]) -> None:
        super().__init__(hosts, folder, "")
        options = KubernetesOptions(image="train:1", kind=kind, nodes=2, ranks_per_node=2, job_name="train")
        self.command: list[str] = container_of(manifests(options, target)[-1])["command"]
        self.rendezvous = self.command[self.command.index("--rendezvous") + 1]
        for index in range(2):
            self.env[index] = controller_variables(kind, index, 2, self.rendezvous.partition(":")[0])

    def name_first(self, address: str | None) -> None:
        """Have the name of the first pod lead to ``address`` on every host, or nowhere."""
        for namespace in self.hosts.namespaces:
            file = HOSTS_FILES / namespace / "hosts"
            kept = [line for line in file.read_text().splitlines() if not line.endswith(" pod")]
            named = [] if address is None else [f"{address} {self.rendezvous.partition(':')[0]} pod"]
            file.write_text("".join(f"{line}\n" for line in (*kept, *named)))

    def start(self, host: int) -> None:
        """Start the pod of a host."""
        assert self.command[:2] == ["rankwise", "run"]
        self.words = [str(host) if word == INDEX else word for word in self.command[2:]]
        super().start(host)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("kind", "evicted"), [("job", [0]), ("jobset", [1]), ("trainjob", [0, 1])])
def test_an_evicted_pod_has_all_ranks_save_at_one_step_and_the_pods_that_follow_resume_there(
    hosts: Hosts, tmp_path: Path, kind: str, evicted: list[int]
) -> None:
    pods = Pods(hosts, tmp_path, kind, [str(INTERRUPTED), str(tmp_path)])
    pods.name_first(hosts.addresses[0])
    for host in range(2):
        pods.start(host)
    pods.wait_for("begun")
    for host in evicted:
        pods.launchers[host].send_signal(signal.SIGTERM)
    assert [pods.exit_code(0), pods.exit_code(1)] == [STOPPED, STOPPED], pods.said()
    assert "stopped early because of SIGTERM, and saved" in pods.said()
    assert len(list((tmp_path / "net").iterdir())) == 1
    (tmp_path / "hurry").touch()
    for host in (1, 0):
        pods.start(host)
    assert [pods.exit_code(0), pods.exit_code(1)] == [0, 0], pods.said()
    check_resumed(tmp_path, 4)


@pytest.mark.parametrize("before", [None, NOBODY])
def test_a_pod_waits_for_the_name_of_the_first_one_and_follows_it_to_another_address(
    hosts: Hosts, tmp_path: Path, before: str | None
) -> None:
    """A name is known only once its pod has started, and leads to its predecessor for a while."""
    (tmp_path / "hurry").touch()
    pods = Pods(hosts, tmp_path, "job", [str(INTERRUPTED), str(tmp_path)])
    pods.name_first(before)
    for host in range(2):
        pods.start(host)
    pods.wait_until(lambda: "waiting for the rendezvous at train-0.train:29400" in pods.said())
    pods.name_first(hosts.addresses[0])
    assert [pods.exit_code(0), pods.exit_code(1)] == [0, 0], pods.said()
    check_resumed(tmp_path, 4)


def test_ranks_that_cannot_save_end_at_once_when_their_pod_is_evicted(hosts: Hosts, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(CANNOT_SAVE)
    pods = Pods(hosts, tmp_path, "job", [str(script)])
    pods.name_first(hosts.addresses[0])
    for host in range(2):
        pods.start(host)
    pods.wait_until(lambda: "begun" in pods.said())
    pods.launchers[1].send_signal(signal.SIGTERM)
    assert [pods.exit_code(0), pods.exit_code(1)] == [STOPPED, STOPPED], pods.said()


@pytest.mark.parametrize("kind", ["job", "jobset", "trainjob"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_job_of_one_pod_runs_all_its_ranks(tmp_path: Path, kind: str, num_ranks: int) -> None:
    (tmp_path / "train.py").write_text(REPORTS)
    options = KubernetesOptions(image="train:1", kind=kind, ranks_per_node=num_ranks, job_name="train")
    container = container_of(manifests(options, ["train.py"])[-1])
    variables = {one["name"]: one["value"] for one in container["env"]}
    variables |= controller_variables(kind, 0, 1, "train-node-0-0.train")
    assert container["command"][0] == "rankwise"
    command = [sys.executable, "-m", *container["command"]]
    pod = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    assert pod.returncode == 0, pod.stderr
    assert sorted(path.name for path in tmp_path.glob("* of *")) == [f"{r} of {num_ranks}" for r in range(num_ranks)]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_pod_of_its_own_saves_when_it_is_evicted(hosts: Hosts, tmp_path: Path, num_ranks: int) -> None:
    job = Job(hosts, tmp_path, "")
    job.words = ["-n", str(num_ranks), str(INTERRUPTED), str(tmp_path)]
    job.env[0] = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}
    job.start(0)
    job.wait_for("begun")
    job.launchers[0].send_signal(signal.SIGTERM)
    assert job.exit_code(0) == STOPPED, job.said()
    assert len(list((tmp_path / "net").iterdir())) == 1


def test_the_only_rank_of_a_pod_ends_at_once_if_it_cannot_save(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(CANNOT_SAVE)
    command = [sys.executable, "-m", "rankwise", "run", "-n", "1", "train.py"]
    variables = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}
    pod = subprocess.Popen(command, cwd=tmp_path, env={**os.environ, **variables}, stdout=subprocess.PIPE)
    assert pod.stdout is not None
    assert pod.stdout.readline() == b"begun\n"
    pod.send_signal(signal.SIGTERM)
    pod.communicate(timeout=30)
    assert pod.returncode == STOPPED
