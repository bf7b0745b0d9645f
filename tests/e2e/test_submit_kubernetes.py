# SPDX-License-Identifier: Apache-2.0
"""``rankwise submit --kubernetes`` with the real kubectl.

No registry has a Kubernetes API server: what kubectl talks to here keeps what it is given, and refuses what does not
fit the schemas that Kubeflow Trainer publishes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from kubeflow_trainer_api import models

from rankwise.launch.kubernetes import KubernetesOptions, manifests

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

KINDS = {
    "v1": {"Secret": models.IoK8sApiCoreV1Secret, "Service": models.IoK8sApiCoreV1Service},
    "batch/v1": {"Job": models.IoK8sApiBatchV1Job},
    "jobset.x-k8s.io/v1alpha2": {"JobSet": models.JobsetV1alpha2JobSet},
    "trainer.kubeflow.org/v1alpha1": {"TrainJob": models.TrainerV1alpha1TrainJob},
}


class Api(ThreadingHTTPServer):
    """The part of a Kubernetes API server that kubectl's create and get call, for as long as the block lasts."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        """Everything that was created, by kind and name."""

    def read(self, path: str) -> tuple[int, dict[str, Any]]:
        """Return the answer to a request that changes nothing."""
        groups = [version.split("/") for version in KINDS if "/" in version]
        if path == "/api":
            return 200, {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            listed = [{"groupVersion": f"{name}/{version}", "version": version} for name, version in groups]
            found = [{"name": one["groupVersion"].split("/")[0], "versions": [one]} for one in listed]
            return 200, {"kind": "APIGroupList", "apiVersion": "v1", "groups": found}
        version = path.removeprefix("/apis/").removeprefix("/api/")
        if version not in KINDS:
            *_, kinds, name = path.split("/")
            found_here = [
                one for (kind, named), one in self.objects.items() if (f"{kind.lower()}s", named) == (kinds, name)
            ]
            return (200, found_here[0]) if found_here else _failure(404, "NotFound", path)
        resources = [
            {"name": f"{kind.lower()}s", "kind": kind, "namespaced": True, "verbs": ["create", "get"]}
            for kind in KINDS[version]
        ]
        return 200, {
            "kind": "APIResourceList",
            "apiVersion": "v1",
            "groupVersion": version,
            "resources": resources,
        }

    def create(self, one: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Keep an object that fits its schema and is not there yet."""
        kind, name = one["kind"], one["metadata"]["name"]
        labels = {"labels": one["metadata"]["labels"]} if "labels" in one["metadata"] else {}
        plain = {**one, "metadata": {"name": name, **labels}}
        if KINDS[one["apiVersion"]][kind].from_dict(plain).to_dict() != plain:
            return _failure(422, "Invalid", f"{kind} {name} does not fit its schema")
        if (kind, name) in self.objects:
            return _failure(409, "AlreadyExists", f'{kind.lower()}s "{name}" already exists')
        self.objects[kind, name] = plain
        return 201, one


class _Handler(BaseHTTPRequestHandler):
    server: Api

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/openapi/v2":
            # An empty document: every kind is one that kubectl has no schema of.
            self._answer(200, b"", "application/com.github.proto-openapi.spec.v2.v1.0+protobuf")
        else:
            self._answer_json(*self.server.read(path))

    def do_POST(self) -> None:
        given = self.rfile.read(int(self.headers["Content-Length"]))
        self._answer_json(*self.server.create(json.loads(given)))

    def _answer_json(self, code: int, answer: dict[str, Any]) -> None:
        self._answer(code, json.dumps(answer).encode(), "application/json")

    def _answer(self, code: int, answer: bytes, content_type: str) -> None:
        self.send_response(code)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        pass


def _failure(code: int, reason: str, message: str) -> tuple[int, dict[str, Any]]:
    status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": code}
    return code, {**status, "message": message}


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    with Api() as served:
        thread = threading.Thread(target=served.serve_forever)
        thread.start()
        cluster = {"name": "c", "cluster": {"server": f"http://127.0.0.1:{served.server_address[1]}"}}
        contexts = [{"name": "c", "context": {"cluster": "c", "user": "u"}}]
        config = {"apiVersion": "v1", "kind": "Config", "current-context": "c", "clusters": [cluster]}
        config |= {"contexts": contexts, "users": [{"name": "u", "user": {}}]}
        (tmp_path / "config").write_text(yaml.safe_dump(config), encoding="utf-8")
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
        monkeypatch.setenv("HOME", str(tmp_path))  # kubectl keeps what it has discovered there
        yield served
        served.shutdown()
        thread.join()


def submit(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rankwise", "submit", "--kubernetes", "--image", "train:1", *words, "train.py"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("kind", ["job", "jobset", "trainjob"])
def test_a_job_is_created_with_a_secret_of_its_own(api: Api, kind: str) -> None:
    ran = submit("--kind", kind, "--nodes", "2")
    assert ran.returncode == 0, ran.stderr
    secret = api.objects.pop(("Secret", "train"))["stringData"]["secret"]
    assert len(secret) >= 32
    assert secret not in ran.stdout + ran.stderr
    options = KubernetesOptions(image="train:1", kind=kind, nodes=2, job_name="train")
    assert list(api.objects.values()) == manifests(options, ["train.py"])
    assert "secret/train created\n" in ran.stdout
    assert f"to end it: kubectl delete {kind} train" in ran.stderr


def test_a_second_job_of_the_same_name_is_refused_and_the_first_keeps_its_secret(api: Api) -> None:
    assert submit("--nodes", "2").returncode == 0
    before = dict(api.objects)
    ran = submit("--nodes", "2")
    assert ran.returncode == 2
    assert 'jobs "train" already exists' in ran.stderr
    assert "do        kubectl delete job train, or pass another --job-name" in ran.stderr
    assert api.objects == before
    del api.objects["Job", "train"]
    assert submit("--nodes", "2").returncode == 0
    assert api.objects["Secret", "train"] == before["Secret", "train"]


@pytest.mark.parametrize("kind", ["Secret", "Service"])
@pytest.mark.parametrize("labels", [{}, {"app.kubernetes.io/managed-by": "Helm"}])
def test_an_object_of_that_name_that_rankwise_did_not_create_is_refused(
    api: Api, kind: str, labels: dict[str, str]
) -> None:
    other: dict[str, Any] = {"apiVersion": "v1", "kind": kind, "metadata": {"name": "train", "labels": labels}}
    api.objects[kind, "train"] = other
    ran = submit("--nodes", "2")
    assert ran.returncode == 2
    assert f"The {kind} train exists, and rankwise did not create it." in ran.stderr
    assert "pass another --job-name" in ran.stderr
    assert api.objects[kind, "train"] == other
    assert ("Job", "train") not in api.objects
    other["metadata"]["labels"] = {"app.kubernetes.io/managed-by": "rankwise"}  # as the error advises
    assert submit("--nodes", "2").returncode == 0


def test_what_kubectl_says_of_a_cluster_without_the_kind_is_shown(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(KINDS, "trainer.kubeflow.org/v1alpha1")
    ran = submit("--kind", "trainjob")
    assert ran.returncode == 2
    assert "kubectl did not create the TrainJob train." in ran.stderr
    assert "no matches for kind" in ran.stderr
