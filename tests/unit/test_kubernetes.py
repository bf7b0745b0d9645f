# SPDX-License-Identifier: Apache-2.0
"""The manifests of docs/kubernetes.md: whole, and read by rankwise as they are meant."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from launcher_variables import OWN

from rankwise.cli import _parser
from rankwise.world.environments.process import STOP_SIGNAL, read_process
from rankwise.world.environments.table import read

if TYPE_CHECKING:
    import pytest

PAGE = Path(__file__).parents[2] / "docs" / "kubernetes.md"
PORT = 23456
"""The operator's default."""


def manifests() -> dict[str, dict[str, Any]]:
    """Return each manifest of the page by its kind."""
    blocks = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return {found["kind"]: found for block in blocks for found in yaml.safe_load_all(block)}


def variables_of_replicas(job: dict[str, Any]) -> list[dict[str, str]]:
    """Return what each pod of a PyTorchJob gets, as the operator's setPodEnv does it: the master first."""
    replicas = job["spec"]["pytorchReplicaSpecs"]
    world_size = sum(replica["replicas"] for replica in replicas.values())
    name = f"{job['metadata']['name']}-master-0"
    return [
        {
            "PYTHONUNBUFFERED": "1",
            "MASTER_ADDR": name,
            "MASTER_PORT": str(PORT),
            "PET_MASTER_ADDR": name,
            "PET_MASTER_PORT": str(PORT),
            "PET_NODE_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "RANK": str(rank),
        }
        for rank in range(world_size)
    ]


def test_each_replica_of_the_pytorchjob_is_a_rank() -> None:
    job = manifests()["PyTorchJob"]
    readings = [read(variables) for variables in variables_of_replicas(job)]
    assert [(reading.rank, reading.world_size) for reading in readings] == [(rank, 4) for rank in range(4)]
    assert {reading.address for reading in readings} == {("train-master-0", PORT)}
    assert {reading.source for reading in readings} == {"env"}


def test_a_pod_that_is_evicted_is_asked_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables_of_replicas(manifests()["PyTorchJob"])[1].items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    assert "SIGTERM" in read_process().stop_signals


def test_a_rank_below_an_agent_of_the_pod_is_asked_to_stop_by_the_agent_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent ends ranks with SIGTERM, for instance before a restart: they must not save and exit with success."""
    for name, value in OWN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    assert read_process().stop_signals == (STOP_SIGNAL,)


def test_every_container_of_the_pytorchjob_has_the_name_that_the_operator_looks_for() -> None:
    for replica in manifests()["PyTorchJob"]["spec"]["pytorchReplicaSpecs"].values():
        (container,) = replica["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"
        assert container["env"][0]["name"] == "RANKWISE_SECRET"
        volumes = {volume["name"] for volume in replica["template"]["spec"]["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes


def test_the_pods_of_the_indexed_job_meet_at_the_first() -> None:
    found = manifests()
    job, service = found["Job"], found["Service"]
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    options = _parser().parse_args(container["command"][1:])
    num_pods = job["spec"]["completions"]
    assert options.nodes == (num_pods, num_pods)
    assert job["spec"]["parallelism"] == num_pods
    assert options.rendezvous == (f"{job['metadata']['name']}-0.{pod['subdomain']}", 29400)
    assert service["metadata"]["name"] == pod["subdomain"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
