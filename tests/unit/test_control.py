# SPDX-License-Identifier: Apache-2.0
"""Asking a launcher from another terminal: found, asked, answered, and safe from what is no question."""

from __future__ import annotations

import json
import os
import select
import socket
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from rankwise.cli import main
from rankwise.cli.top import NOTHING_YET, table
from rankwise.errors import LaunchError
from rankwise.launch.agent import inspection as service
from rankwise.launch.agent.inspection import InspectService
from rankwise.launch.inspect import control_socket
from rankwise.launch.inspect.control_socket import ControlSocket, RunningJob, jobs
from rankwise.launch.messages import InspectAnswer, InspectRequest, StartAttempt
from rankwise.store import opening
from rankwise.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

COMMAND = ["rankwise", "run", "-n", "2", "my train.py"]
SECRET = b"of these tests"


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this test's jobs have their folders; a name too long for the address of a socket."""
    long = tmp_path / ("long" * 30)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    return long


class _Launcher:
    """A launcher as far as others see it: answers in a thread what the agent answers in its loop."""

    def __init__(self, answer: Callable[[dict[str, Any]], dict[str, Any]], *, number: int = 1) -> None:
        self.folder = tempfile.mkdtemp(prefix="rankwise-")
        self.control = ControlSocket(self.folder, ranks=[0, 1], command=COMMAND)
        self._answer = answer
        self._thread = threading.Thread(target=self._serve, args=(number,))
        self._thread.start()

    def _serve(self, number: int) -> None:
        while number:
            readable, _, _ = select.select([self.control], [], [], 10)
            self.control.serve_one(self._answer)
            number -= bool(readable)

    def close(self) -> None:
        self._thread.join(10)
        self.control.close()


@pytest.fixture
def launcher(folders: Path) -> Iterator[Callable[..., _Launcher]]:
    """Start launchers that answer a number of connections; a look for jobs is one."""
    del folders
    started: list[_Launcher] = []

    def start(answer: Callable[[dict[str, Any]], dict[str, Any]], *, number: int) -> _Launcher:
        started.append(_Launcher(answer, number=number))
        return started[-1]

    yield start
    for one in started:
        one.close()


def test_a_job_is_found_asked_and_answered(launcher: Callable[..., _Launcher]) -> None:
    launcher(lambda request: {"you asked": request, "long": "x" * 500_000}, number=2)
    (job,) = jobs()
    assert (job.pid, job.ranks, job.command) == (os.getpid(), [0, 1], COMMAND)
    answer = control_socket.ask(job, {"kind": "stacks"})
    assert answer["you asked"] == {"kind": "stacks"}
    assert len(answer["long"]) == 500_000


def test_the_remains_of_a_killed_launcher_are_not_a_job(folders: Path) -> None:
    folder = tempfile.mkdtemp(prefix="rankwise-")
    ControlSocket(folder).close()
    (folders / "rankwise-empty").mkdir()
    (folders / "rankwise-file").touch()
    assert jobs() == []


def test_a_job_of_another_version_is_an_error_with_the_command_for_it(
    launcher: Callable[..., _Launcher], capsys: pytest.CaptureFixture[str]
) -> None:
    """As what a later version may write: a fact more."""
    one = launcher(lambda _: {}, number=1)
    path = Path(one.folder) / "job.json"
    about = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(about | {"python": "/opt/a b/python", "version": "99.0", "more": 1}))
    assert main(["top", "--once"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"runs with rankwise 99.0, and this is {VERSION}" in said
    assert f"'/opt/a b/python' -m rankwise top --job {os.getpid()}" in said


def test_a_job_without_ranks_so_far_answers_top(folders: Path) -> None:
    ranks: Any = SimpleNamespace(attempt=None)
    link: Any = None
    with ControlSocket(tempfile.mkdtemp(prefix="rankwise-")) as control, ThreadPoolExecutor(1) as terminal:
        (job,) = jobs()
        inspection = InspectService(control, ranks)
        asked = terminal.submit(control_socket.ask, job, {"kind": "steps"})
        # A thread serves each request: until it has accepted one, the socket still has it.
        while not asked.done():
            if select.select([inspection], [], [], 0.1)[0]:
                inspection.serve(link)
        assert table(asked.result()) == f"{NOTHING_YET}\n"


@pytest.mark.parametrize("asked", [b"", b"\n", b"[]\n", b"no json\n", b"x" * 100_000 + b"\n"])
def test_an_invalid_request_disturbs_no_client(launcher: Callable[..., _Launcher], asked: bytes) -> None:
    one = launcher(lambda _: {"it": "lives"}, number=3)
    with control_socket._connected(one.folder) as connection:
        try:
            connection.sendall(asked)
            connection.shutdown(socket.SHUT_WR)
            answer = connection.recv(1000)
        except OSError:  # it did not read that far
            answer = b""
    assert answer == b"" or "error" in json.loads(answer)
    (job,) = jobs()
    assert control_socket.ask(job, {}) == {"it": "lives"}


def test_a_client_that_sends_no_request_does_not_hold_up_the_launcher(
    launcher: Callable[..., _Launcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_socket, "REQUEST_SECONDS", 0.05)
    one = launcher(lambda _: {}, number=1)
    with control_socket._connected(one.folder) as connection:
        connection.settimeout(10)
        assert connection.recv(1) == b"", "the launcher closes the connection"


class _OtherMachine:
    """A link of a launcher to one other machine, which answers when the test has it answer."""

    def __init__(self, service: InspectService, *, is_slow: bool) -> None:
        self._service = service
        self._is_slow = is_slow
        self._requests: list[InspectRequest] = []

    def send(self, request: InspectRequest) -> None:
        self._requests.append(request)
        if len(self._requests) == 2:
            if self._is_slow:
                self.answer(0)
            self.answer(1)

    def answer(self, place: int) -> None:
        answers = {1: {"silent": f"answer {place}", "stack": [], "host": "other"}}
        asked = self._requests[place]
        answer = InspectAnswer(question=asked.question, number=asked.number, asker="here", node_rank=1, answers=answers)
        self._service.handle(answer, None)


@pytest.mark.parametrize("comes", ["before the next question", "after the next question"])
def test_a_late_answer_of_a_machine_is_not_shown_for_the_next_request(
    folders: Path, monkeypatch: pytest.MonkeyPatch, comes: str
) -> None:
    del folders
    monkeypatch.setattr(service, "STACKS_SECONDS", 0)
    served, port = opening.serve(secret=SECRET)
    ranks: Any = SimpleNamespace(
        attempt=StartAttempt(
            run_id="run", attempt=0, first_rank=0, world_size=2, node_rank=0, num_nodes=2, ranks_per_node="1(x2)"
        ),
        job=SimpleNamespace(address=("127.0.0.1", port), secret=SECRET.decode()),
        running_processes=dict,
        stack_files=dict,
        send_signal=None,
    )
    job = RunningJob(
        folder=tempfile.mkdtemp(prefix="rankwise-"), pid=os.getpid(), command=COMMAND, ranks=[0], version="", python=""
    )
    with closing(served), ControlSocket(job.folder) as control, ThreadPoolExecutor(1) as terminal:
        inspection = InspectService(control, ranks)
        other: Any = _OtherMachine(inspection, is_slow=comes == "after the next question")

        def ask() -> dict[str, Any]:
            asked = terminal.submit(control_socket.ask, job, {"kind": "stacks"})
            select.select([inspection], [], [], 10)
            inspection.serve(other)
            return asked.result()["ranks"]

        assert ask() == {}
        if comes == "before the next question":
            other.answer(0)
        assert ask()["1"]["silent"] == "answer 1"


def test_an_error_of_the_launcher_is_returned_to_the_caller(launcher: Callable[..., _Launcher]) -> None:
    def fail(_: dict[str, Any]) -> dict[str, Any]:
        raise TimeoutError("the store is slow")

    launcher(fail, number=2)
    (job,) = jobs()
    with pytest.raises(LaunchError, match="the store is slow") as caught:
        control_socket.ask(job, {"kind": "stacks"})
    assert caught.value.evidence == "TimeoutError: the store is slow"
    assert "try again" in (caught.value.do or "")


def test_the_command_prints_what_the_job_answers(
    launcher: Callable[..., _Launcher], capsys: pytest.CaptureFixture[str]
) -> None:
    launcher(lambda request: {"text": f"asked to {request['kind']}\n"}, number=2)
    assert main(["stacks"]) == 0
    assert capsys.readouterr().out == "asked to stacks\n"


def test_the_command_says_when_there_is_no_job(folders: Path, capsys: pytest.CaptureFixture[str]) -> None:
    del folders
    assert main(["stacks"]) == 2
    assert "You have no job on this machine" in capsys.readouterr().err


def test_the_command_has_one_of_several_jobs_chosen(
    launcher: Callable[..., _Launcher], capsys: pytest.CaptureFixture[str]
) -> None:
    launcher(lambda _: {}, number=2)
    launcher(lambda _: {}, number=2)
    assert main(["stacks"]) == 2
    said = capsys.readouterr().err
    assert (
        f"You have 2 jobs on this machine.\n  evidence  {os.getpid()}: ranks 0-1: rankwise run -n 2 'my train.py'"
        in said
    )
    assert f"rankwise stacks --job {os.getpid()}" in said
    assert main(["stacks", "--job", "1"]) == 2
    assert "Process 1 is not the launcher of a job." in capsys.readouterr().err
