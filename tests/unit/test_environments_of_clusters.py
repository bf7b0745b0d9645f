# SPDX-License-Identifier: Apache-2.0
"""Schedulers of clusters and clouds: each process joins, or is told which line to write. None trains alone in silence.

The variables are those that the makers document, and not captured: their programs do not run here. What MPICH, Open MPI
and PRRTE set is captured, and ``tests/e2e/test_launchers.py`` runs them.
"""

from __future__ import annotations

import json
import os

import pytest
from launcher_variables import ALONE, HYDRA, OPENMPI, OWN, PLAIN, SLURM, TORCHRUN, facts, golden

from rankwise.cli.doctor import env_as_text
from rankwise.errors import ConfigurationError
from rankwise.launch.options import LaunchOptions
from rankwise.launch.start import _with_scheduler as with_scheduler
from rankwise.world.environments.process import of_one_process, read_launcher, read_process
from rankwise.world.environments.table import explain, read

TRAINJOB = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "auto",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29500",
    "JOB_COMPLETION_INDEX": "1",
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
}
JSRUN = {
    "LSB_JOBID": "12",
    "JSM_NAMESPACE_RANK": "1",
    "JSM_NAMESPACE_SIZE": "2",
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "3",
    "PMIX_RANK": "1",
}
FLUX = {
    "FLUX_JOB_ID": "f6GTiEwHs1",
    "FLUX_JOB_SIZE": "2",
    "FLUX_JOB_NNODES": "1",
    "FLUX_TASK_RANK": "1",
    "FLUX_TASK_LOCAL_ID": "1",
    "FLUX_URI": "local:///run/flux/local",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
}
PALS = {
    "PALS_APID": "5f0d7c1a",
    "PALS_NODEID": "1",
    "PALS_RANKID": "3",
    "PALS_LOCAL_RANKID": "1",
    "PALS_LOCAL_SIZE": "2",
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
    "MASTER_ADDR": "x1000c0s0b0n0",
    "MASTER_PORT": "29400",
}
MVAPICH2 = {
    "MV2_COMM_WORLD_RANK": "1",
    "MV2_COMM_WORLD_SIZE": "2",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
}
SAGEMAKER = {"SM_HOSTS": '["algo-1","algo-2"]', "SM_CURRENT_HOST": "algo-2", "SM_NUM_GPUS": "1"}
CLUSTER = {
    "workerpool0": ["cmle-training-workerpool0-0:2222"],
    "workerpool1": ["cmle-training-workerpool1-0:2222", "cmle-training-workerpool1-1:2222"],
    "workerpool3": ["cmle-training-workerpool3-0:2222"],
}
VERTEX = {"CLUSTER_SPEC": json.dumps({"cluster": CLUSTER, "task": {"type": "workerpool1", "index": 1}})}
TF_CONFIG = {
    "TF_CONFIG": json.dumps({"cluster": {"worker": ["w-0:2222", "w-1:2222"]}, "task": {"type": "worker", "index": 0}})
}
SKYPILOT = {
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "1",
}
DSTACK = {
    "DSTACK_NODE_RANK": "1",
    "DSTACK_NODES_NUM": "2",
    "DSTACK_MASTER_NODE_IP": "10.0.0.4",
    "DSTACK_GPUS_PER_NODE": "0",
}
BATCH = {
    "AWS_BATCH_JOB_NODE_INDEX": "0",
    "AWS_BATCH_JOB_NUM_NODES": "3",
    "AWS_BATCH_JOB_MAIN_NODE_INDEX": "1",
    "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "10.0.0.4",
}
BATCH_MAIN = {**BATCH, "AWS_BATCH_JOB_NODE_INDEX": "1", "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": ""}
LEPTON = {
    "LEPTON_JOB_WORKER_INDEX": "1",
    "LEPTON_JOB_TOTAL_WORKERS": "2",
    "LEPTON_JOB_WORKER_PREFIX": "worker",
    "LEPTON_SUBDOMAIN": "train-job-svc",
    "LEPTON_RESOURCE_ACCELERATOR_NUM": "1",
    "JOB_COMPLETION_INDEX": "1",
}
PAI_DLC = {**PLAIN, "WORLD_SIZE": "2", "NPROC_PER_NODE": "1", "DLC_JOB_ID": "dlc1a2b3c"}
# Source: ray/train/torch/config.py, _set_torch_distributed_env_vars.
RAY_TRAIN = {**PLAIN, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "0", "ACCELERATE_TORCH_DEVICE": "cpu"}

JOINED = {
    "TrainJob": (TRAINJOB, "trainjob", (1, 2, 0, 1, 1, 2), ("job-node-0-0.job", 29500)),
    "jsrun": (JSRUN, "jsrun", (1, 2, 1, 2, 0, 1), None),
    "Flux": (FLUX, "flux", (1, 2, 1, None, 0, 1), None),
    "PALS": (PALS, "pals", (3, 4, 1, 2, 1, None), ("x1000c0s0b0n0", 29400)),
    "MVAPICH2": (MVAPICH2, "mvapich2", (1, 2, 1, 2, 0, 1), None),
    "SageMaker": (SAGEMAKER, "sagemaker", (1, 2, 0, 1, 1, 2), ("algo-1", 29500)),
    "Vertex": (VERTEX, "vertex", (2, 3, 0, 1, 2, 3), ("cmle-training-workerpool0-0", 2222)),
    "TF_CONFIG": (TF_CONFIG, "tf-config", (0, 2, 0, 1, 0, 2), ("w-0", 2222)),
    "SkyPilot": (SKYPILOT, "skypilot", (1, 2, 0, 1, 1, 2), ("10.0.0.4", 29500)),
    "dstack": (DSTACK, "dstack", (1, 2, 0, 1, 1, 2), ("10.0.0.4", 29500)),
    "AWS Batch": (BATCH, "aws-batch", (2, 3, 0, 1, 2, 3), ("10.0.0.4", 29500)),
    "the main node of AWS Batch": (BATCH_MAIN, "aws-batch", (0, 3, 0, 1, 0, 3), ("localhost", 29500)),
    "Lepton": (LEPTON, "lepton", (1, 2, 0, 1, 1, 2), ("worker-0.train-job-svc", 29500)),
    "PAI-DLC": (PAI_DLC, "pai-dlc", (1, 2, 0, 1, 1, 2), ("job-master-0", 23456)),
    "Ray Train": (RAY_TRAIN, "env", (1, 4, 1, 2, None, None), ("job-master-0", 23456)),
}


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Variables of the process, of which there are none at first."""
    for name in list(os.environ):
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize("name", JOINED)
def test_a_process_of_the_scheduler_joins(name: str) -> None:
    variables, source, expected, address = JOINED[name]
    reading = read(variables, launcher_process="77-8")
    assert (reading.source, facts(reading), reading.address) == (source, expected, address)
    assert reading.address or reading.job_key
    assert not reading.warns


@pytest.mark.parametrize(
    ("variables", "seen", "line"),
    [
        ({"JOB_COMPLETION_INDEX": "0"}, "JOB_COMPLETION_INDEX=0", "rankwise run --nodes <number of pods> --rendezvous"),
        # JobSet sets no variable of its own; a name of the user's does not matter.
        ({"JOB_COMPLETION_INDEX": "2", "JOBSET_NAME": "train"}, "JOB_COMPLETION_INDEX=2", "RANKWISE_ALONE=1"),
        ({"JOB_COMPLETION_INDEX": "1", "WORLD_SIZE": "2"}, "WORLD_SIZE=2", "set MASTER_ADDR to the first pod's name"),
        ({"PMIX_RANK": "0", "PMIX_NAMESPACE": "prterun-n1-7@1"}, "PMIX_RANK=0", "prterun --personality ompi"),
        ({**PALS, "PMI_SIZE": "", "PMI_RANK": ""}, "PALS_RANKID=3", "mpiexec --pmi=cray"),
        ({**FLUX, "FLUX_JOB_NNODES": "2"}, "FLUX_TASK_RANK=1", "flux run --env=MASTER_ADDR="),
        ({**JSRUN, "JSM_NAMESPACE_LOCAL_SIZE": ""}, "JSM_NAMESPACE_RANK=1", "jsrun -E MASTER_ADDR="),
        ({**MVAPICH2, "MV2_COMM_WORLD_LOCAL_SIZE": ""}, "MV2_COMM_WORLD_RANK=1", "mpirun_rsh ... MASTER_ADDR="),
        ({**TRAINJOB, "PET_NNODES": "1:4", "PET_RDZV_ENDPOINT": "a:29400"}, "1:4", "--nodes 1:4 --rendezvous a:29400"),
        ({**TRAINJOB, "PET_NPROC_PER_NODE": "4"}, "PET_NPROC_PER_NODE=4", "rankwise run train.py"),
        ({**SKYPILOT, "SKYPILOT_NUM_GPUS_PER_NODE": "8"}, "SKYPILOT_NODE_RANK=1", "rankwise run train.py"),
        ({**PAI_DLC, "NPROC_PER_NODE": "8"}, "NPROC_PER_NODE=8", "rankwise run train.py"),
        ({**SAGEMAKER, "SM_CURRENT_HOST": "algo-3"}, "SM_CURRENT_HOST=algo-3", "correct both"),
        ({**DSTACK, "DSTACK_NODE_RANK": ""}, "DSTACK_NODES_NUM=2", "set DSTACK_NODE_RANK in every process"),
        ({**DSTACK, "DSTACK_MASTER_NODE_IP": ""}, "DSTACK_NODE_RANK=1", "set MASTER_ADDR"),
    ],
)
def test_a_process_that_cannot_join_is_told(variables: dict[str, str], seen: str, line: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read(variables)
    assert seen in (caught.value.evidence or "")
    assert line in (caught.value.do or "")
    assert env_as_text(explain(variables)).startswith("undecided; the script would fail with:")


@pytest.mark.parametrize("text", ["[", "[]", "null", "3", '{"cluster": {"worker": ["a:1"]}, "task": 1}'])
@pytest.mark.parametrize("name", ["CLUSTER_SPEC", "TF_CONFIG", "SM_HOSTS"])
def test_json_of_another_form_is_named(name: str, text: str) -> None:
    with pytest.raises(ConfigurationError, match=name):
        read({name: text})


@pytest.mark.parametrize("text", ["{}", '{"cluster": {}, "task": {}}', '{"cluster": null}'])
def test_a_cluster_of_no_machines_is_no_job(text: str) -> None:
    reading = read({"TF_CONFIG": text})
    assert (facts(reading), reading.source) == (ALONE[0], "nobody")


def test_one_machine_needs_no_number_and_no_port() -> None:
    for number in ("1", "1:1"):
        assert facts(read({"PET_NNODES": number}))[:2] == (0, 1)
    with pytest.raises(ConfigurationError, match="rank 1 of 1"):
        read({"PET_NNODES": "1", "PET_NODE_RANK": "1"})
    assert read({**TRAINJOB, "PET_NNODES": "2:2"}).world_size == 2
    # Kubernetes sets it in pods next to a service named master.
    service = {"MASTER_PORT": "tcp://10.0.0.9:2222"}
    assert read({**SKYPILOT, "SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_RANK": "0", **service}).world_size == 1
    assert read({**SKYPILOT, **service}).address == ("10.0.0.4", 29500)


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize(
    "around",
    [
        {"PET_NNODES": "1", "PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": "auto"},
        {"PET_NNODES": "1", "PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": "1"},
        {"NPROC_PER_NODE": "1"},
        {"NPROC_PER_NODE": "2"},
    ],
)
def test_ranks_started_by_hand_in_a_pod_are_ranks(rank: str, around: dict[str, str]) -> None:
    reading = read({**PLAIN, "RANK": rank, "WORLD_SIZE": "2", **around})
    assert (reading.source, *facts(reading)[:3]) == ("env", int(rank), 2, None)


STEP_OF_ONE = golden("slurm_one_task")[0]["variables"]
ONE_OF_ONE = [STEP_OF_ONE, {"RANK": "0", "WORLD_SIZE": "1"}, {"PMI_RANK": "0", "PMI_SIZE": "1"}]


@pytest.mark.parametrize("around", [SKYPILOT, TF_CONFIG, DSTACK, TRAINJOB])
@pytest.mark.parametrize("single", ONE_OF_ONE)
def test_a_single_rank_of_several_machines_never_trains_alone(single: dict[str, str], around: dict[str, str]) -> None:
    if single is STEP_OF_ONE:
        assert read({**single, **around}).world_size == 2
        return
    with pytest.raises(ConfigurationError, match="disagree"):
        read({**single, **around})


@pytest.mark.parametrize("single", [*ONE_OF_ONE, {"PET_NNODES": "1"}])
def test_a_single_rank_may_be_one_of_several_under_any_name(single: dict[str, str]) -> None:
    for unknown in ({"NODE_RANK": "1", "NNODES": "2"}, {"NODE_RANK": "0", "NNODES": "2"}, {"ACME_NODE_RANK": "1"}):
        with pytest.raises(ConfigurationError, match="seems to be one of several"):
            read({**single, **unknown})
    # The batch script of another scheduler.
    assert facts(read({**single, "PMIX_RANK": "0", "PBS_NUM_NODES": "2"}))[:2] == (0, 1)


def test_a_step_of_one_task_on_one_machine_keeps_what_slurm_tells() -> None:
    around = {"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_NODES": "1", "PMIX_RANK": "0"}
    assert read({**STEP_OF_ONE, **around}).source == "slurm"
    with pytest.raises(ConfigurationError, match="expects 4 ranks here"):
        read({**STEP_OF_ONE, "PET_NNODES": "1", "PET_NPROC_PER_NODE": "4"})


def test_pmix_left_over_from_a_shell_is_no_launch() -> None:
    # srun --pty bash, and sbatch there, which exports all.
    left = {"SLURM_JOB_ID": "9", "SLURM_TASKS_PER_NODE": "2", "SLURM_STEP_TASKS_PER_NODE": "1", "PMIX_RANK": "0"}
    for more in ({}, {"SLURM_STEP_ID": "0"}, {"NNODES": "2"}):
        assert read({**left, **more}).source == "nobody"


def test_a_machine_that_only_evaluates_is_told() -> None:
    task = {"type": "workerpool3", "index": 0}
    with pytest.raises(ConfigurationError, match="its task is workerpool3 0"):
        read({"CLUSTER_SPEC": json.dumps({"cluster": CLUSTER, "task": task})})


def test_ranks_of_one_machine_share_a_key_that_other_jobs_do_not() -> None:
    for variables, of_other in ((JSRUN, {"LSB_JOBID": "13"}), (FLUX, {"FLUX_URI": "local:///run/flux/2"})):
        key = read(variables).job_key
        assert key is not None
        assert key != read({**variables, **of_other}).job_key
    # A number that is unique among the steps of one job only is no name.
    with pytest.raises(ConfigurationError, match="cannot be found"):
        read({**JSRUN, "LSB_JOBID": ""})


# -- one machine, and launchers of ranks within a scheduler's job ----------------------------------------------------


@pytest.mark.parametrize(
    "variables",
    [
        {"PET_NNODES": "1", "PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": "auto", "JOB_COMPLETION_INDEX": "0"},
        {"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_NODES": "1", "SKYPILOT_NUM_GPUS_PER_NODE": "8"},
        {"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1", "SM_NUM_GPUS": "8"},
        {**PLAIN, "RANK": "0", "WORLD_SIZE": "1", "NPROC_PER_NODE": "8"},
    ],
)
def test_a_single_machine_is_a_world_of_one(variables: dict[str, str], only: pytest.MonkeyPatch) -> None:
    assert facts(read(variables))[:2] == (0, 1)
    for name, value in variables.items():
        only.setenv(name, value)
    assert read_launcher() is None


def test_a_single_pod_of_several_processes_is_told_and_starts_them(only: pytest.MonkeyPatch) -> None:
    variables = {"PET_NNODES": "1", "PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": "4"}
    with pytest.raises(ConfigurationError, match="expects 4 ranks here"):
        read(variables)
    # A PyTorchJob's RANK numbers pods, of a WORLD_SIZE of ranks.
    with pytest.raises(ConfigurationError, match="expects 4 ranks here"):
        read({**variables, "RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "n0", "MASTER_PORT": "23456"})
    for name, value in variables.items():
        only.setenv(name, value)
    assert with_scheduler(LaunchOptions()) == LaunchOptions(num_ranks=4)
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "n0", "MASTER_PORT": "23456"}.items():
        only.setenv(name, value)
    assert with_scheduler(LaunchOptions()) == LaunchOptions(num_ranks=4)
    assert with_scheduler(LaunchOptions(num_ranks=2)) == LaunchOptions(num_ranks=2)


@pytest.mark.parametrize(
    "around", [TRAINJOB, VERTEX, SKYPILOT, DSTACK, BATCH, LEPTON, SAGEMAKER, {"JOB_COMPLETION_INDEX": "1"}]
)
@pytest.mark.parametrize("launcher", [OWN, TORCHRUN, OPENMPI, HYDRA, SLURM, FLUX, {**PLAIN, "LOCAL_RANK": "1"}])
def test_a_launcher_of_ranks_counts_more_than_the_scheduler_around_it(
    launcher: dict[str, str], around: dict[str, str]
) -> None:
    reading = read({**around, **launcher}, launcher_process="77-8")
    assert facts(reading) == facts(read(launcher, launcher_process="77-8"))


@pytest.mark.parametrize("launcher", [SLURM, JSRUN, OPENMPI])
def test_pmix_beside_a_launcher_s_own_variables_says_nothing(launcher: dict[str, str]) -> None:
    assert read({**launcher, "PMIX_RANK": "7"}).source != "prrte"


# -- rankwise run, one launcher per machine ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [(name, None) for name, (_, source, place, _) in JOINED.items() if place[2:4] == (0, 1) and source != "env"]
    + [("TrainJob", 4)],
)
def test_rankwise_run_becomes_a_machine_of_the_job(name: str, num_ranks: int | None, only: pytest.MonkeyPatch) -> None:
    variables, _, place, address = JOINED[name]
    for variable, value in (variables | ({"PET_NPROC_PER_NODE": "4"} if num_ranks else {})).items():
        only.setenv(variable, value)
    options = with_scheduler(LaunchOptions())
    assert (options.node_rank, options.nodes, options.rendezvous) == (place[0], (place[1], place[1]), address)
    assert (options.num_ranks, options.told_by_scheduler) == (num_ranks, True)
    only.setenv("RANKWISE_ALONE", "1")
    assert with_scheduler(LaunchOptions()) == LaunchOptions()


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"JOB_COMPLETION_INDEX": "1"}, "incomplete"),
        ({"ACME_NODE_RANK": "1"}, "seems to be one of several"),
        (JSRUN, "2 launchers were started on this machine"),
        ({**FLUX, "FLUX_JOB_NNODES": "1"}, "Several launchers were started on this machine"),
        (OPENMPI, "4 launchers were started on this machine"),
    ],
)
def test_launchers_that_cannot_meet_are_told(variables: dict[str, str], text: str, only: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        only.setenv(name, value)
    with pytest.raises(ConfigurationError, match=text):
        with_scheduler(LaunchOptions())
    meeting = LaunchOptions(nodes=(2, 2), rendezvous=("train-0.train", 29400))
    assert with_scheduler(meeting) == meeting


def test_a_launcher_in_a_rank_starts_a_job_of_its_own(only: pytest.MonkeyPatch) -> None:
    for name, value in {**OWN, **TRAINJOB}.items():
        only.setenv(name, value)
    assert read_launcher() is None


# -- variables that nobody knows --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "variables",
    [
        {"ACME_RANK": "1", "ACME_SIZE": "2"},
        {"ACME_RANK": "0", "ACME_SIZE": "2"},
        {"ACME_JOB_NODE_RANK": "3"},
        {"NODE_RANK": "0", "NUM_NODES": "2"},
        {"WORKER_INDEX": "1"},
        {"VC_TASK_INDEX": "0", "VC_WORKER_NUM": "2"},
        {"PADDLE_TRAINER_ID": "0", "PADDLE_TRAINERS_NUM": "4"},
        {"NOMAD_ALLOC_INDEX": "1"},
        {"POD_INDEX": "1"},
        {"GLOBAL_RANK": "0", "ACME_NTASKS": "8"},
        {"LOCAL_RANK": "1"},
        {"FOO_RANK": "1", "FOO_SIZE": "4"},
        {"FOO_RANK": "1", "NUM_NODES": "4"},
        {"FOO_PROCESS_INDEX": "0", "FOO_NUM_PROCESSES": "4"},
        {"RANK_ID": "0", "RANK_SIZE": "8"},
        # As their makers document them; none of these schedulers can run here.
        {"NGC_ARRAY_INDEX": "0", "NGC_ARRAY_SIZE": "2"},
        {"PBS_NODENUM": "1", "PBS_VNODENUM": "2"},
        {"LSF_PM_TASKID": "3"},
        {"ALPS_APP_PE": "1"},
        {"_CONDOR_PROCNO": "0", "_CONDOR_NPROCS": "4"},
        {"DMLC_WORKER_ID": "0", "DMLC_NUM_WORKER": "2"},
        {"JAX_PROCESS_ID": "0", "JAX_NUM_PROCESSES": "4"},
        {"REPLICA_ID": "1", "NUM_REPLICAS": "2"},
        {"REPLICA_ID": "2", "REPLICAS": "4"},
    ],
)
def test_one_of_several_under_any_name_never_trains_alone(variables: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match="seems to be one of several of a job") as caught:
        read(variables)
    assert all(f"{name}={value}" in (caught.value.evidence or "") for name, value in variables.items())
    assert "rankwise run --nodes" in (caught.value.do or "")
    assert "RANKWISE_ALONE=1" in (caught.value.do or "")
    alone = read({**variables, "RANKWISE_ALONE": "1"})
    assert (facts(alone), alone.reason) == (ALONE[0], "one rank, because RANKWISE_ALONE is set")


@pytest.mark.parametrize(
    "variables",
    [
        {"CI": "true", "CI_NODE_INDEX": "2", "CI_NODE_TOTAL": "4"},
        {"CIRCLE_NODE_INDEX": "1", "CIRCLE_NODE_TOTAL": "2"},
        {"BUILDKITE_PARALLEL_JOB": "1", "BUILDKITE_PARALLEL_JOB_COUNT": "3"},
        {"GITHUB_RUN_NUMBER": "7", "GITHUB_JOB": "test"},
        {"PYTEST_XDIST_WORKER": "gw1", "PYTEST_XDIST_WORKER_COUNT": "3"},
        {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "9", "SLURM_JOB_ID": "5"},
        {"AWS_BATCH_JOB_ARRAY_INDEX": "3", "AWS_BATCH_JOB_ARRAY_SIZE": "9"},
        {"PBS_ARRAY_INDEX": "3"},
        {"LSB_JOBINDEX": "3"},
        {"SGE_TASK_ID": "3"},
        {"LORA_RANK": "8", "BATCH_SIZE": "32", "NUM_WORKERS": "4", "NPROC": "8", "IMAGE_SIZE": "224"},
        {"NETWORK_RANK": "32"},
        {"KV_RANK": "4"},
        {"CP_RANK": "1"},
        {"LOCAL_RANK": "0", "LOCAL_BATCH_SIZE": "32"},
        {"NOMAD_ALLOC_INDEX": "0", "NOMAD_META_BATCH_SIZE": "32"},
        {"TASK_INDEX": "0", "TASK_NUM_EPOCHS": "3"},
        {"NODE_RANK": "0", "NNODES": "1", "NODE_MEM_SIZE": "64"},
        {"KNAPSACK_PRO_CI_NODE_INDEX": "1", "KNAPSACK_PRO_CI_NODE_TOTAL": "2"},
        {"HARNESS_NODE_INDEX": "1", "HARNESS_NODE_TOTAL": "2"},
        {"BATCH_TASK_INDEX": "1", "BATCH_TASK_COUNT": "2"},
        {"CLOUD_RUN_TASK_INDEX": "1", "CLOUD_RUN_TASK_COUNT": "2"},
        {"WORKER_INDEX": "0"},
        {"NODE_RANK": "0", "NUM_NODES": "1"},
        {"NODE_RANK": "first"},
        {"NGC_ARRAY_INDEX": "0", "NGC_ARRAY_SIZE": "1", "NGC_REPLICA_ID": "0"},
        {"PBS_NODENUM": "0", "PBS_VNODENUM": "0", "PBS_TASKNUM": "146", "PBS_NP": "4"},
        {"LSB_DJOB_NUMPROC": "4"},
        {"LSF_PM_TASKID": "1", "LSB_DJOB_NUMPROC": "1"},
        {"_CONDOR_PROCNO": "0", "_CONDOR_NPROCS": "1"},
        {"WORKER_ID": "7", "NUM_WORKERS": "4", "NUM_PROCESSES": "2", "NPROCS": "8"},
        {"PROCESS_ID": "0", "NUM_WORKERS": "4", "WORLD_CUP_REPLICAS": "3"},
        {"GPU_ID": "1", "NUM_GPUS": "4", "FOLD_ID": "1", "NUM_FOLDS": "5"},
        {"SLURM_JOB_ID": "5", "SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS": "1"},
    ],
)
def test_other_numbers_are_no_ranks(variables: dict[str, str]) -> None:
    reading = read(variables)
    assert (facts(reading), reading.source, reading.warns) == (ALONE[0], "nobody", False)


def test_a_count_without_a_number_is_a_warning() -> None:
    # As in the batch script of a scheduler, which runs once for a job of several nodes.
    reading = read({"PBS_NUM_NODES": "2"})
    assert reading.warns
    assert "PBS_NUM_NODES=2 is set" in reading.reason
    assert not read({"PBS_NUM_NODES": "2", "RANKWISE_ALONE": "1"}).warns
    # The number of a batch job's first process, and of the first task of blaunch.
    assert read({"PBS_NUM_NODES": "2", "PBS_NODENUM": "0"}).warns
    assert "LSB_DJOB_NUMPROC=4 is set" in read({"LSF_PM_TASKID": "1", "LSB_DJOB_NUMPROC": "4"}).reason


@pytest.mark.parametrize("name", [*JOINED, "Slurm", "indexed Job"])
def test_one_rank_may_be_meant(name: str) -> None:
    more = {"Slurm": SLURM, "indexed Job": {"JOB_COMPLETION_INDEX": "2"}}
    variables = more[name] if name in more else JOINED[name][0]
    assert facts(read({**variables, "RANKWISE_ALONE": "1"})) == ALONE[0]
    assert read({"ACME_NODE_RANK": "0", "RANKWISE_ALONE": "0"}).reason == "no launcher's variables are set"


@pytest.mark.parametrize("launcher", [OWN, TORCHRUN])
def test_ranks_of_rankwise_and_torchrun_are_never_alone(launcher: dict[str, str]) -> None:
    assert facts(read({**launcher, "RANKWISE_ALONE": "1"})) == facts(read(launcher))


def test_what_a_script_of_auto_starts_sees_no_number_of_a_job(only: pytest.MonkeyPatch) -> None:
    kept = {"NUM_NODES": "2708", "LORA_RANK": "8"}
    hidden = {**OWN, **TRAINJOB, "ACME_NODE_RANK": "1"}
    for name, value in {**kept, **hidden}.items():
        only.setenv(name, value)
    with of_one_process():
        assert read_process().source == "nobody"
        assert kept.items() <= os.environ.items()
    only.setenv("SM_HOSTS", '["algo-1"]')
    only.setenv("SM_CURRENT_HOST", "algo-1")
    with of_one_process():
        # Scripts for SageMaker read their defaults from these.
        assert os.environ["SM_CURRENT_HOST"] == "algo-1"


def test_real_launchers_have_no_numbers_of_unknown_names() -> None:
    for name in ("mpich", "openmpi", "slurm_two_nodes", "torchrun"):
        for process in golden(name):
            assert read(process["variables"], launcher_process="77-8").source != "nobody"
