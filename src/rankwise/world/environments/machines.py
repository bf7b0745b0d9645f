# SPDX-License-Identifier: Apache-2.0
"""The rows of schedulers that start one process per machine, or per pod: their variables number the machines.

``rankwise run`` in each of them makes them the machines of one job. A script that they start directly is the only rank
of its machine, unless the scheduler expects several. Reads variables from a mapping.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from rankwise.errors import ConfigurationError
from rankwise.world.environments.reading import (
    Environment,
    Missing,
    Reading,
    checked_port,
    given,
    integer,
    job_secret,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rankwise.world.environments.reading import ProcessContext

    Variables = Mapping[str, str]

DEFAULT_PORT = 29500
"""The port of the job's store on the first machine, if no variable gives one."""


class _Place(NamedTuple):
    """This machine among those of its job, and where the first one is."""

    rank: int
    num_machines: int
    host: str | None = None
    port: int | None = None


def _row(
    name: str,
    title: str,
    find: Callable[[Variables], _Place | Missing | None],
    *,
    sign: str,
    names: tuple[str, ...] = (),
    ranks: str = "",
    counts_processes: bool = False,
    present: Callable[[Variables], bool] = lambda _: True,
    set_address: str = "set MASTER_ADDR to the address of the first machine",
    complete: str = "",
) -> Environment:
    """Return a row. What is not listed here is as in :class:`Environment`.

    - ``find``: returns the place of this machine; ``None`` if the variables describe no job.
    - ``sign``: the variable that shows that the scheduler is present, if ``present`` agrees.
    - ``names``: the variables to show besides; none that may hold a secret.
    - ``ranks``: the variable with the number of GPUs of a machine, or with ``counts_processes`` of the processes that
      the user asked for, also on a single machine.
    """

    def read(around: ProcessContext) -> Reading | Missing | None:
        variables = around.variables
        if not variables.get(sign) or not present(variables):
            return None
        place = find(variables)
        if place is None or isinstance(place, Missing):
            return place
        host = variables.get("MASTER_ADDR") or place.host
        # Kubernetes sets MASTER_PORT=tcp://... in every pod next to a service named master.
        is_given = place.num_machines > 1 and not variables.get("MASTER_PORT", "").startswith("tcp://")
        given_port = integer(variables, "MASTER_PORT") if is_given else None
        port = checked_port(given_port or place.port or DEFAULT_PORT, "MASTER_PORT")
        # Torchrun's own variable may also be auto, cpu or gpu.
        asked = int(number) if (number := variables.get(ranks, "")).isdecimal() else 1
        return Reading(
            source=name,
            rank=place.rank,
            world_size=place.num_machines,
            local_rank=0,
            local_world_size=1,
            node_rank=place.rank,
            num_nodes=place.num_machines,
            address=(host, port) if host else None,
            secret=job_secret(variables),
            ranks_to_start=asked if counts_processes or place.num_machines > 1 else 1,
        )

    return Environment(
        name=name,
        title=title,
        sign=sign,
        because=f"{sign} is set, and its job has one process per machine",
        names=(*names, *((ranks,) if ranks else ()), "MASTER_ADDR", "MASTER_PORT"),
        read=read,
        set_address=set_address,
        complete=complete,
        yields=True,
    )


def _numbered(rank: str, number: str, host: str = "", port: str = "") -> Callable[[Variables], _Place | Missing]:
    """Return a reader of plain variables; a list of hosts begins with the first machine."""

    def find(variables: Variables) -> _Place | Missing:
        missing = tuple(name for name in (rank, number) if not variables.get(name))
        # One machine needs no number.
        if missing and not (missing == (rank,) and given(variables, number) == 1):
            return Missing(names=missing)
        hosts = variables.get(host, "").split()
        return _Place(
            integer(variables, rank) or 0,
            given(variables, number),
            hosts[0] if hosts else None,
            integer(variables, port),
        )

    return find


def numbers_machines(variables: Variables) -> bool:
    """Return whether RANK numbers machines here, as other variables show, and not ranks.

    Users also export NPROC_PER_NODE, and start ranks by hand in a pod: those number ranks.
    """
    rank, size = variables.get("RANK"), variables.get("WORLD_SIZE")
    if not rank or not size or size == "1" or variables.get("LOCAL_RANK"):
        return False
    if variables.get("NPROC_PER_NODE") and any(map(variables.get, _JOBS)):
        return True
    machines, each = variables.get("PET_NNODES", ""), variables.get("PET_NPROC_PER_NODE", "")
    # Source: getNprocPerNodeInt of kubeflow/training-operator: auto, cpu and gpu count as 1 there.
    ranks = int(machines) * (int(each) if each.isdecimal() else 1) if machines.isdecimal() else None
    return rank == variables.get("PET_NODE_RANK") and size == str(ranks)


_JOBS = ("DLC_JOB_ID", "AIHC_JOB_NAME")
"""PAI-DLC and AIHC set one of these in their pods. Source: tests of PAI's SDK (alipai); JobSpec in AIHC's manual."""


def _find_in_trainjob(variables: Variables) -> _Place | Missing:
    number = variables["PET_NNODES"]
    least, _, most = number.partition(":")
    if most and least != most:
        raise ConfigurationError(
            "The number of machines of this job may change, and no variable numbers them.",
            evidence=f"PET_NNODES={number}",
            do=f"rankwise run --nodes {number} --rendezvous "
            f"{variables.get('PET_RDZV_ENDPOINT') or '<first machine>:29400'} train.py",
        )
    find = _numbered("PET_NODE_RANK", "PET_NNODES", "PET_MASTER_ADDR", "PET_MASTER_PORT")
    return find({**variables, "PET_NNODES": least})


def _find_in_sagemaker(variables: Variables) -> _Place | Missing:
    listed, own = _parsed(variables, "SM_HOSTS"), variables.get("SM_CURRENT_HOST", "")
    if not isinstance(listed, list):
        raise _malformed("SM_HOSTS")
    hosts = [str(host) for host in cast("list[object]", listed)]
    if own not in hosts:
        raise ConfigurationError(
            "SM_CURRENT_HOST is not one of SM_HOSTS.",
            evidence=f"SM_CURRENT_HOST={own} SM_HOSTS={variables['SM_HOSTS']}",
            do="correct both, or unset SM_HOSTS",
        )
    return _Place(hosts.index(own), len(hosts), hosts[0])


_POOLS = ("workerpool0", "workerpool1", "chief", "master", "worker")
"""Groups of machines that train, in the order of their ranks. Others evaluate, or serve parameters or reductions."""


def _find_in_cluster(sign: str) -> Callable[[Variables], _Place | None]:
    """Return a reader of the JSON of a cluster and of this machine's task in it."""

    def find(variables: Variables) -> _Place | None:
        read = _parsed(variables, sign)
        # TensorFlow too takes this for a process of its own.
        if isinstance(read, dict) and not cast("dict[str, Any]", read).get("cluster"):
            return None
        try:
            machines = [(pool, index) for pool in _POOLS for index, _ in enumerate(read["cluster"].get(pool, ()))]
            own = read["task"]["type"], int(read["task"].get("index", 0))
            host, _, port = str(read["cluster"][machines[0][0]][0]).rpartition(":")
            if own in machines:
                return _Place(machines.index(own), len(machines), host, int(port))
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise _malformed(sign) from error
        raise ConfigurationError(
            f"This machine does not train: {sign} says that its task is {own[0]} {own[1]}.",
            do=f"start the script as {', '.join(_POOLS[:-1])} or {_POOLS[-1]} only, or set RANKWISE_ALONE=1 for one "
            "rank of its own",
        )

    return find


def _parsed(variables: Variables, name: str) -> Any:
    try:
        return json.loads(variables[name])
    except ValueError as error:
        raise _malformed(name) from error


def _malformed(name: str) -> ConfigurationError:
    return ConfigurationError(f"{name} does not have the expected form.", do=f"correct {name}, or unset it")


def _find_in_batch(variables: Variables) -> _Place | Missing:
    host = "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"
    found = _numbered("AWS_BATCH_JOB_NODE_INDEX", "AWS_BATCH_JOB_NUM_NODES", host)(variables)
    if isinstance(found, Missing):
        return found
    main = integer(variables, "AWS_BATCH_JOB_MAIN_NODE_INDEX") or 0
    # The main node is told no address: it serves the others.
    host = "localhost" if found.rank == main else found.host
    return found._replace(rank=(found.rank - main) % max(1, found.num_machines), host=host)


def _find_in_lepton(variables: Variables) -> _Place | Missing:
    found = _numbered("LEPTON_JOB_WORKER_INDEX", "LEPTON_JOB_TOTAL_WORKERS")(variables)
    prefix, domain = variables.get("LEPTON_JOB_WORKER_PREFIX"), variables.get("LEPTON_SUBDOMAIN")
    return (
        found if isinstance(found, Missing) or not (prefix and domain) else found._replace(host=f"{prefix}-0.{domain}")
    )


# Source: "Jobs" of the Kubernetes documentation. JobSet adds no variable to those of its Jobs. After all others,
# which also run as such jobs.
INDEXED_JOB = _row(
    "indexed-job",
    "an indexed Job or JobSet",
    _numbered("JOB_COMPLETION_INDEX", "WORLD_SIZE"),
    sign="JOB_COMPLETION_INDEX",
    names=("JOB_COMPLETION_INDEX", "WORLD_SIZE"),
    set_address="set MASTER_ADDR to the first pod's name in its service, for example train-0.train",
    complete="rankwise run --nodes <number of pods> --rendezvous <first pod>.<service>:29400 train.py\n"
    "or set RANKWISE_ALONE=1, if each pod trains a model of its own",
)
ROWS = (
    # Source: kubeflow/trainer, pkg/runtime/framework/plugins/torch/torch.go: options of torchrun, for each pod. The
    # PyTorchJob of its predecessor has them too, with a RANK that numbers its pods and a WORLD_SIZE of ranks.
    _row(
        "trainjob",
        "Kubeflow TrainJob",
        _find_in_trainjob,
        sign="PET_NNODES",
        names=("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"),
        ranks="PET_NPROC_PER_NODE",
        counts_processes=True,
    ),
    # Source: "Built-in environment variables" of Alibaba Cloud's Platform for AI. Baidu's AIHC sets the same.
    _row(
        "pai-dlc",
        "PAI-DLC",
        _numbered("RANK", "WORLD_SIZE", "MASTER_ADDR"),
        sign="NPROC_PER_NODE",
        present=numbers_machines,
        names=("RANK", "WORLD_SIZE"),
        ranks="NPROC_PER_NODE",
    ),
    # Source: ENVIRONMENT_VARIABLES.md of aws/sagemaker-training-toolkit. The list of hosts is sorted.
    _row(
        "sagemaker",
        "SageMaker",
        _find_in_sagemaker,
        sign="SM_HOSTS",
        names=("SM_HOSTS", "SM_CURRENT_HOST"),
        ranks="SM_NUM_GPUS",
    ),
    # Source: "Distributed training" of Vertex AI: the first pool has one machine, the primary replica. Their values
    # are not shown: they also hold the arguments of the job.
    _row("vertex", "Vertex AI", _find_in_cluster("CLUSTER_SPEC"), sign="CLUSTER_SPEC"),
    _row("tf-config", "TF_CONFIG", _find_in_cluster("TF_CONFIG"), sign="TF_CONFIG"),
    # Source: "Distributed Multi-Node Jobs" of SkyPilot.
    _row(
        "skypilot",
        "SkyPilot",
        _numbered("SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_IPS"),
        sign="SKYPILOT_NUM_NODES",
        names=("SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES"),
        ranks="SKYPILOT_NUM_GPUS_PER_NODE",
    ),
    # Source: runner/internal/executor of dstackai/dstack, and "Distributed tasks" of its documentation.
    _row(
        "dstack",
        "dstack",
        _numbered("DSTACK_NODE_RANK", "DSTACK_NODES_NUM", "DSTACK_MASTER_NODE_IP"),
        sign="DSTACK_NODES_NUM",
        names=("DSTACK_NODE_RANK", "DSTACK_NODES_NUM", "DSTACK_MASTER_NODE_IP"),
        ranks="DSTACK_GPUS_PER_NODE",
    ),
    # Source: "Multi-node parallel jobs: environment variables" of AWS Batch.
    _row(
        "aws-batch",
        "AWS Batch",
        _find_in_batch,
        sign="AWS_BATCH_JOB_NUM_NODES",
        names=(
            *("AWS_BATCH_JOB_NODE_INDEX", "AWS_BATCH_JOB_NUM_NODES", "AWS_BATCH_JOB_MAIN_NODE_INDEX"),
            "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS",
        ),
    ),
    # Source: "Environment Variables Reference" of NVIDIA DGX Cloud Lepton.
    _row(
        "lepton",
        "DGX Cloud Lepton",
        _find_in_lepton,
        sign="LEPTON_JOB_TOTAL_WORKERS",
        names=("LEPTON_JOB_WORKER_INDEX", "LEPTON_JOB_TOTAL_WORKERS", "LEPTON_JOB_WORKER_PREFIX", "LEPTON_SUBDOMAIN"),
        ranks="LEPTON_RESOURCE_ACCELERATOR_NUM",
    ),
    INDEXED_JOB,
)
