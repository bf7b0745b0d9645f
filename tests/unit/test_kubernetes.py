# SPDX-License-Identifier: Apache-2.0
"""The manifests that ``rankwise submit --kubernetes`` writes, held to the published schemas, and those of the page.

The schemas are the models that Kubeflow Trainer 2.3 publishes: of its TrainJob, of JobSet, and of Kubernetes' own
objects. The commands run in tests/multihost/test_pods.py, kubectl in tests/e2e/test_submit_kubernetes.py.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from kubeflow_trainer_api import models
from launcher_variables import OWN

from rankwise.cli import _parser, main
from rankwise.errors import ConfigurationError
from rankwise.launch.kubernetes import INDEX, Kind, KubernetesOptions, manifest_text, manifests, secret
from rankwise.world.environments.process import read_process
from rankwise.world.environments.table import read

PAGE = Path(__file__).parents[2] / "docs" / "kubernetes.md"
PORT = 23456
"""The default of the operator of PyTorchJob."""
KINDS = get_args(Kind)
SCHEMAS = {
    "Job": models.IoK8sApiBatchV1Job,
    "JobSet": models.JobsetV1alpha2JobSet,
    "TrainJob": models.TrainerV1alpha1TrainJob,
    "Service": models.IoK8sApiCoreV1Service,
    "Secret": models.IoK8sApiCoreV1Secret,
}
FOUR_PODS: dict[str, Any] = {
    "image": "registry.example.org/train:1",
    "nodes": 4,
    "gpus_per_node": 8,
    "cpus_per_rank": 8,
    "claim": "runs:/work/runs",
}
AWKWARD = ["train.py", "--name", "two: words", "--flag", "yes", "5e3", "$(HOME)", "#", "é", "'\"\n", ""]


def options(kind: str = "job", **more: Any) -> KubernetesOptions:
    return KubernetesOptions(**{"kind": kind, "image": "train:1", "job_name": "train", **more})


def check(one: dict[str, Any]) -> None:
    """Hold an object to its schema: no other field, every required one, and their types."""
    assert SCHEMAS[one["kind"]].from_dict(one).to_dict() == one


def pod_of(objects: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what each pod of a job runs: the specification of a TrainJob's is in two places."""
    job = objects[-1]
    if job["kind"] == "TrainJob":
        (patch,) = job["spec"]["runtimePatches"]
        (of_nodes,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
        pod = of_nodes["template"]["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        return pod | {"containers": [{**job["spec"]["trainer"], **container}]}
    if job["kind"] == "JobSet":
        (of_nodes,) = job["spec"]["replicatedJobs"]
        job = of_nodes["template"]
    return job["spec"]["template"]["spec"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("more", [{}, {"nodes": 2}, FOUR_PODS])
def test_each_object_fits_its_published_schema_and_reads_as_it_was_meant(kind: str, more: dict[str, Any]) -> None:
    objects = manifests(options(kind, **more), AWKWARD)
    for one in objects:
        check(one)
    text = manifest_text(options(kind, **more), AWKWARD)
    assert list(yaml.safe_load_all(text)) == objects
    assert ("RANKWISE_SECRET" in text) == ("kubectl create secret generic train " in text) == (len(more) > 0)


def test_a_field_that_no_schema_has_is_noticed() -> None:
    wrong = manifests(options(), ["train.py"])[-1]
    wrong["spec"]["template"]["spec"]["subdomains"] = "train"
    with pytest.raises(AssertionError):
        check(wrong)


def test_the_secret_of_a_job_fits_its_schema() -> None:
    check(secret("train", "of this job"))


@pytest.mark.parametrize("kind", KINDS)
def test_pods_meet_at_the_first_one(kind: str) -> None:
    objects = manifests(options(kind, **FOUR_PODS), ["train.py", "--price", "$(PRICE)"])
    (container,) = pod_of(objects)["containers"]
    assert container["command"][-1] == "$$(PRICE)", "Kubernetes would replace $(PRICE)"
    words = [word.replace(INDEX, "3").replace("$$", "$") for word in container["command"]]
    parsed = _parser().parse_args(words[1:])
    first = "train-0.train" if kind == "job" else "train-node-0-0.train"
    assert (parsed.nodes, parsed.node_rank, parsed.rendezvous) == ((4, 4), 3, (first, 29400))
    assert (parsed.num_ranks, parsed.target, parsed.arguments) == (8, "train.py", ["--price", "$(PRICE)"])
    if kind == "job":
        service, job = objects
        assert service["metadata"]["name"] == pod_of(objects)["subdomain"]
        assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_of_one_pod_does_not_look_for_others(kind: str) -> None:
    (job,) = manifests(options(kind), ["-m", "pkg.train"])
    (container,) = pod_of([job])["containers"]
    assert container["command"] == ["rankwise", "run", "-n", "1", "-m", "pkg.train"]
    assert container["env"] == [{"name": "RANKWISE_ALONE", "value": "1"}]


@pytest.mark.parametrize("kind", KINDS)
def test_every_mount_of_a_pod_is_one_of_its_volumes(kind: str) -> None:
    pod = pod_of(manifests(options(kind, **FOUR_PODS), ["train.py"]))
    (container,) = pod["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts == {"shm": "/dev/shm", "claim": "/work/runs"}  # noqa: S108 - of the pod
    assert {volume["name"] for volume in pod["volumes"]} == mounts.keys()


@pytest.mark.parametrize("kind", ["job", "jobset"])
def test_pods_that_saved_or_were_evicted_start_again_and_do_not_count(kind: str) -> None:
    job = manifests(options(kind), ["train.py"])[-1]["spec"]
    spec = job if kind == "job" else job["replicatedJobs"][0]["template"]["spec"]
    evicted, stopped = spec["podFailurePolicy"]["rules"]
    assert evicted["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert stopped["onExitCodes"] == {"operator": "In", "values": [75]}
    assert evicted["action"] == stopped["action"] == "Ignore"
    assert spec["template"]["spec"]["restartPolicy"] == "Never", "without it the policy is refused"


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"job_name": "My_net"}, "cannot name a job on Kubernetes"),
        ({"job_name": "a" * 41}, "cannot name a job on Kubernetes"),
        ({"claim": "runs"}, "--claim must be NAME:/PATH"),
        ({"nodes": 0}, "--nodes must be >= 1"),
        ({"ranks_per_node": 4, "gpus_per_node": 2}, "4 ranks per node need one GPU each"),
    ],
)
def test_what_kubernetes_would_refuse_is_refused_here(more: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        options(**more)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--image", "train:1"], "--image is not an option of a job on Slurm"),
        (["--kubernetes"], "--kubernetes needs the container image to run"),
        (["--kubernetes", "--image", "train:1", "--sbatch=--qos=high"], "--sbatch is not an option of a job on Kub"),
    ],
)
def test_options_of_the_other_scheduler_are_refused(
    capsys: pytest.CaptureFixture[str], words: list[str], expected: str
) -> None:
    assert main(["submit", *words, "train.py"]) == 2
    assert expected in capsys.readouterr().err


def test_a_dry_run_prints_the_manifest_of_a_script_that_is_not_here(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    words = ["submit", "--kubernetes", "--image", "train:1", "--nodes", "2"]
    assert main([*words, "--dry-run", "My_net.py", "--nodes", "5"]) == 0
    expected = manifest_text(options(nodes=2, job_name="my-net"), ["My_net.py", "--nodes", "5"])
    assert capsys.readouterr().out == expected
    assert main([*words, "My_net.py"]) == 2
    assert "kubectl was not found on this machine" in capsys.readouterr().err


# -- the page ----------------------------------------------------------------------------------------------------------


def blocks() -> list[str]:
    return re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_shows_what_submit_writes(kind: str) -> None:
    assert manifest_text(options(kind, **FOUR_PODS), ["train.py"]) in blocks()


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


def pytorchjob() -> dict[str, Any]:
    (found,) = (one for block in blocks() for one in yaml.safe_load_all(block) if one["kind"] == "PyTorchJob")
    return found


def test_each_replica_of_the_pytorchjob_is_a_rank() -> None:
    readings = [read(variables) for variables in variables_of_replicas(pytorchjob())]
    assert [(reading.rank, reading.world_size) for reading in readings] == [(rank, 4) for rank in range(4)]
    assert {reading.address for reading in readings} == {("train-master-0", PORT)}
    assert {reading.source for reading in readings} == {"env"}


def test_every_container_of_the_pytorchjob_has_the_name_that_the_operator_looks_for() -> None:
    for replica in pytorchjob()["spec"]["pytorchReplicaSpecs"].values():
        (container,) = replica["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"
        assert container["env"][0]["name"] == "RANKWISE_SECRET"
        volumes = {volume["name"] for volume in replica["template"]["spec"]["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes


# -- eviction ----------------------------------------------------------------------------------------------------------


def test_a_pod_that_runs_the_script_itself_is_asked_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables_of_replicas(pytorchjob())[1].items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    assert "SIGTERM" in read_process().stop_signals


def test_a_rank_below_an_agent_of_the_pod_is_asked_to_stop_by_the_signal_that_the_agent_passes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in OWN.items():
        monkeypatch.setenv(name, value)
    assert "SIGTERM" not in read_process().stop_signals
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    assert "SIGTERM" in read_process().stop_signals
