# SPDX-License-Identifier: Apache-2.0
"""Kubernetes jobs: the manifest of a plain Job, a JobSet or a TrainJob, as values and as YAML, and creating it.

Each pod runs ``rankwise run`` for one machine. Calls kubectl. Never prints, reads no variable. Imported by the command
line.

Source: kubernetes.io/docs/concepts/workloads/controllers/job; jobset.sigs.k8s.io/docs/concepts;
    kubeflow.org/docs/components/trainer, and its pkg/runtime/framework/plugins/torch for the first pod's name.
"""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rankwise.errors import ConfigurationError, LaunchError
from rankwise.health.preemption import STOPPED_EXIT_CODE
from rankwise.launch.auth import draw_secret
from rankwise.launch.job_size import JobSize

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Manifest = dict[str, Any]
Kind = Literal["job", "jobset", "trainjob"]

RETRIES = 3
"""How often a pod of a Job may fail, or a JobSet be restarted; what an eviction ends does not count."""
PORT = 29400
RUNTIME = "torch-distributed"
"""The ClusterTrainingRuntime that Kubeflow Trainer installs for torch."""
NODE = "node"
"""The name of that runtime's job and container, which a TrainJob's patches must repeat."""
INDEX = "$(JOB_COMPLETION_INDEX)"
"""The number of the pod: Kubernetes replaces it in the command."""
OWNER_LABEL = "app.kubernetes.io/managed-by"
OWN: dict[str, str] = {OWNER_LABEL: "rankwise"}
"""The label of the Secrets and Services that are created here."""
LONGEST_NAME = 40
"""Leaves room for what controllers append to it in the names of pods, within 63 letters."""
NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


@dataclass(frozen=True, kw_only=True, slots=True)
class KubernetesOptions(JobSize):
    """The options of a job on Kubernetes; its machines are pods, which have ``save_seconds`` to save if evicted."""

    image: str
    """With Python, rankwise and the script."""
    kind: Kind = "job"
    claim: str | None = None
    """``NAME:/PATH``: a volume claim, and where each pod mounts it."""

    def __post_init__(self) -> None:
        JobSize.__post_init__(self)  # super() does not work in a class with slots that is made by dataclass()
        if not NAME.fullmatch(self.job_name) or len(self.job_name) > LONGEST_NAME:
            raise ConfigurationError(
                f"{self.job_name!r} cannot name a job on Kubernetes.",
                do=f"pass --job-name with at most {LONGEST_NAME} lower-case letters, digits and dashes, a letter first",
            )
        if self.claim is not None and not re.fullmatch(r"[^:/]+:/[^:]*", self.claim):
            raise ConfigurationError(
                f"--claim must be NAME:/PATH, got {self.claim!r}.", do="for example --claim runs:/work/runs"
            )


# -- the manifest --------------------------------------------------------------------------------------------


def manifests(options: KubernetesOptions, target: Sequence[str]) -> list[Manifest]:
    """Return the objects to create, the job last; ``target`` follows ``rankwise run`` and its options.

    They refer to a Secret of the job's name, which is not among them, if there are several pods.
    """
    match options.kind:
        case "job":
            return [*_services(options), _job(options, target)]
        case "jobset":
            return [_jobset(options, target)]
        case "trainjob":
            return [_trainjob(options, target)]


def secret(name: str, value: str) -> Manifest:
    """Return the Secret with which the pods of a job authenticate."""
    metadata = {"name": name, "labels": OWN}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": {"secret": value}}


def _services(options: KubernetesOptions) -> list[Manifest]:
    """Return the service that gives the pods of a plain Job their names; the other kinds have one of their own."""
    if options.nodes == 1:
        return []
    spec: Manifest = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {"job-name": options.job_name},
    }
    metadata = {"name": options.job_name, "labels": OWN}
    return [{"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}]


def _job(options: KubernetesOptions, target: Sequence[str]) -> Manifest:
    pod = _pod(options, target, first_pod=f"{options.job_name}-0.{options.job_name}")
    if options.nodes > 1:
        pod = {"subdomain": options.job_name, **pod}
    spec = {"backoffLimitPerIndex": RETRIES, "maxFailedIndexes": 0, **_job_spec(options, pod)}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": options.job_name}, "spec": spec}


def _jobset(options: KubernetesOptions, target: Sequence[str]) -> Manifest:
    pod = _pod(options, target, first_pod=_first_pod_of_set(options))
    spec = {"backoffLimit": 0, **_job_spec(options, pod)}
    of_nodes = {"name": NODE, "replicas": 1, "template": {"spec": spec}}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": options.job_name},
        "spec": {"failurePolicy": {"maxRestarts": RETRIES}, "replicatedJobs": [of_nodes]},
    }


def _trainjob(options: KubernetesOptions, target: Sequence[str]) -> Manifest:
    pod = _pod(options, target, first_pod=_first_pod_of_set(options))
    container = pod["containers"][0]
    patch = {
        "terminationGracePeriodSeconds": pod["terminationGracePeriodSeconds"],
        "containers": [{"name": NODE, "volumeMounts": container["volumeMounts"]}],
        "volumes": pod["volumes"],
    }
    job = {"name": NODE, "template": {"spec": {"template": {"spec": patch}}}}
    trainer = {
        "image": container["image"],
        "numNodes": options.nodes,
        "command": container["command"],
        "env": container["env"],
        "resourcesPerNode": container["resources"],
    }
    spec = {
        "runtimeRef": {"name": RUNTIME},
        "trainer": trainer,
        "runtimePatches": [
            {"manager": "rankwise", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [job]}}}}
        ],
    }
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": options.job_name},
        "spec": spec,
    }


def _first_pod_of_set(options: KubernetesOptions) -> str:
    """Return the name of the first pod of a JobSet; a TrainJob becomes one of the same name."""
    return f"{options.job_name}-{NODE}-0-0.{options.job_name}"


def _job_spec(options: KubernetesOptions, pod: Manifest) -> Manifest:
    """Return what Jobs and JobSets share: pods that stopped and saved, or were evicted, start again at no cost."""
    ignored: list[Manifest] = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [STOPPED_EXIT_CODE]}},
    ]
    return {
        "completionMode": "Indexed",
        "completions": options.nodes,
        "parallelism": options.nodes,
        "podFailurePolicy": {"rules": ignored},
        "template": {"spec": {"restartPolicy": "Never", **pod}},
    }


def _pod(options: KubernetesOptions, target: Sequence[str], first_pod: str) -> Manifest:
    # Shared memory between the ranks of a pod, and their loader workers: by default it is 64 MB.
    volumes: list[Manifest] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    mounts: list[Manifest] = [{"name": "shm", "mountPath": "/dev/shm"}]  # noqa: S108 - of the pod
    if options.claim is not None:
        name, _, path = options.claim.partition(":")
        volumes.append({"name": "claim", "persistentVolumeClaim": {"claimName": name}})
        mounts.append({"name": "claim", "mountPath": path})
    resources: Manifest = {"requests": {"cpu": str(options.cpus_per_node)}}
    if options.gpus_per_node:
        resources["limits"] = {"nvidia.com/gpu": str(options.gpus_per_node)}
    container: Manifest = {
        "name": NODE,
        "image": options.image,
        "command": _command(options, target, first_pod),
        "env": _env(options),
        "resources": resources,
        "volumeMounts": mounts,
    }
    return {
        "terminationGracePeriodSeconds": options.save_seconds,
        "containers": [container],
        "volumes": volumes,
    }


def _command(options: KubernetesOptions, target: Sequence[str], first_pod: str) -> list[str]:
    words = ["rankwise", "run", "-n", str(options.num_ranks)]
    if options.nodes > 1:
        words += ["--nodes", str(options.nodes), "--node-rank", INDEX, "--rendezvous", f"{first_pod}:{PORT}"]
    # Kubernetes would replace $(NAME) in the script's own arguments.
    return [*words, *(word.replace("$", "$$") for word in target)]


def _env(options: KubernetesOptions) -> list[Manifest]:
    if options.nodes == 1:
        # The pod is numbered, as those of several are: rankwise run would look for the others.
        return [{"name": "RANKWISE_ALONE", "value": "1"}]
    key = {"name": options.job_name, "key": "secret"}
    return [{"name": "RANKWISE_SECRET", "valueFrom": {"secretKeyRef": key}}]


# -- as text -------------------------------------------------------------------------------------------------

PLAIN = re.compile(r"[A-Za-z/]([\w./:-]*[\w/])?")
"""What needs no quotes in YAML, unless it is one of its words."""
OTHER_THAN_TEXT = {"true", "false", "yes", "no", "on", "off", "y", "n", "null", "none"}


def manifest_text(options: KubernetesOptions, target: Sequence[str]) -> str:
    """Return the objects to create as YAML. The secret of their pods is only named: the text may be kept."""
    name = options.job_name
    create = f"kubectl create secret generic {name} --from-literal=secret=$(openssl rand -hex 32)"
    note = [] if options.nodes == 1 else ["# The pods authenticate with a secret. Create it once:", f"# {create}"]
    documents = ["\n".join(_lines(one)) for one in manifests(options, target)]
    return "\n".join([*note, "\n---\n".join(documents), ""])


def _lines(value: Mapping[str, Any]) -> list[str]:
    lines: list[str] = []
    for key, inner in value.items():
        if isinstance(inner, dict) and not _is_short(inner):
            lines += [f"{key}:", *(f"  {line}" for line in _lines(inner))]
        elif isinstance(inner, list) and any(isinstance(one, dict) for one in inner):
            lines.append(f"{key}:")
            for one in inner:
                first, *rest = [_flow(one)] if _is_short(one) else _lines(one)
                lines += [f"  - {first}", *(f"    {line}" for line in rest)]
        else:
            lines.append(f"{key}: {_flow(inner)}")
    return lines


def _is_short(value: Mapping[str, Any]) -> bool:
    """Return whether an object fits on a line."""
    return len(value) <= 2 and not any(isinstance(inner, dict | list) for inner in value.values())  # noqa: PLR2004


def _flow(value: object) -> str:
    match value:
        case dict():
            return "{" + ", ".join(f"{key}: {_flow(inner)}" for key, inner in value.items()) + "}"
        case list():
            return "[" + ", ".join(map(_flow, value)) + "]"
        case str() if PLAIN.fullmatch(value) and value.lower() not in OTHER_THAN_TEXT:
            return value
        case _:
            return json.dumps(value, ensure_ascii=False)


# -- creating it ---------------------------------------------------------------------------------------------

KEPT_IF_THERE = {"Secret", "Service"}
"""What an earlier job of the same name leaves behind, fit for the next, if it has the label."""


def submit(options: KubernetesOptions, target: Sequence[str]) -> str:
    """Create a job in the cluster and the namespace that kubectl uses; return what kubectl said.

    Its secret is drawn here and passed to kubectl's standard input alone. An earlier job's secret is kept: pods of it
    may still run.

    Raises:
        ConfigurationError: there is no kubectl here.
        LaunchError: kubectl failed, and its error is the evidence; or there is a Secret or a Service of that name that
            rankwise did not create.
    """
    objects = manifests(options, target)
    if options.nodes > 1:
        objects.insert(0, secret(options.job_name, draw_secret()))
    return "".join(map(_create, objects))


def _create(one: Manifest) -> str:
    done = _kubectl("create", "-f", "-", given=json.dumps(one))
    if done.returncode == 0:
        return done.stdout
    kind, name = one["kind"], one["metadata"]["name"]
    is_there = "AlreadyExists" in done.stderr
    if is_there and kind in KEPT_IF_THERE:
        _check_owner(one)
        return ""
    raise LaunchError(
        f"kubectl did not create the {kind} {name}.",
        evidence=done.stderr.strip(),
        do=f"kubectl delete {kind.lower()} {name}, or pass another --job-name"
        if is_there
        else "--dry-run shows the manifest; kubectl config get-contexts shows the cluster and the namespace",
    )


def _check_owner(one: Manifest) -> None:
    """Raise :class:`LaunchError` if the object of that kind and name in the cluster is not rankwise's."""
    kind, name = one["kind"], one["metadata"]["name"]
    path = OWNER_LABEL.replace(".", r"\.")
    done = _kubectl("get", kind.lower(), name, "-o", f"jsonpath={{.metadata.labels.{path}}}")
    if done.returncode != 0:
        raise LaunchError(
            f"kubectl did not show whether rankwise created the {kind} {name}, which exists.",
            evidence=done.stderr.strip(),
            do="pass another --job-name",
        )
    owner = done.stdout.strip()
    if owner != OWN[OWNER_LABEL]:
        raise LaunchError(
            f"The {kind} {name} exists, and rankwise did not create it.",
            evidence=f"its label {OWNER_LABEL} is {owner}" if owner else f"it has no label {OWNER_LABEL}",
            do="pass another --job-name\n"
            f"or, if it was made for this job: kubectl label --overwrite {kind.lower()} {name} {OWNER_LABEL}=rankwise",
        )


def _kubectl(*words: str, given: str = "") -> subprocess.CompletedProcess[str]:
    """Run kubectl with ``given`` as its standard input."""
    try:
        return subprocess.run(  # noqa: S603 - no shell
            ["kubectl", *words],  # noqa: S607 - the user's own
            input=given,
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError as error:
        raise ConfigurationError(
            "kubectl was not found on this machine.",
            do="install it, or pass --dry-run and create what it prints where kubectl is",
        ) from error


def next_commands(options: KubernetesOptions) -> str:
    """Return how to follow a job that was created, and how to end it."""
    name = options.job_name
    label = f"job-name={name}" if options.kind == "job" else f"jobset.sigs.k8s.io/jobset-name={name}"
    follow = f"kubectl logs -f --prefix --max-log-requests {options.nodes} -l {label}"
    return f"[rankwise] its output: {follow}\n[rankwise] to end it: kubectl delete {options.kind} {name}\n"
