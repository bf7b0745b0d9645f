# SPDX-License-Identifier: Apache-2.0
"""One command for several hosts, over a real sshd: it trains, fails, ends and refuses as one machine would."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from sshd import SshHosts
from training import CASES, train_all

from rankwise.testing import run_ranks
from tests import plain_script

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.warm import Started

TRAINING = Path(__file__).with_name("training.py")
TOLERANCE = 1e-10
END_SECONDS = 20.0
WAITING = """
import os, sys, time, rankwise as rw
with rw.join() as world:
    rw.barrier()
    try:
        print(f"begun {world.rank} {os.getpid()}")
        time.sleep(100)
    except KeyboardInterrupt:
        open(f"interrupted-{world.rank}", "x").close()
        raise
"""


@pytest.fixture(scope="module")
def ssh_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    """Two hosts and a laptop, for all tests here."""
    with SshHosts(2, tmp_path_factory.mktemp("ssh")) as made:
        yield made


@dataclass
class Job:
    """One ``rankwise run`` on the laptop, in a folder of its own."""

    hosts: SshHosts
    folder: Path

    def write(self, name: str, text: str) -> None:
        (self.folder / name).parent.mkdir(exist_ok=True)
        (self.folder / name).write_text(textwrap.dedent(text), encoding="utf-8")

    def run(self, *words: str, env: dict[str, str] | None = None) -> tuple[int, str, str]:
        """Run to the end; return the exit code, stdout and stderr."""
        with (self.folder / "stdout").open("w") as stdout, (self.folder / "stderr").open("w") as stderr:
            process = self.hosts.run(*words, cwd=self.folder, stdout=stdout, stderr=stderr, env=env)
            process.wait(50)
        return process.returncode, (self.folder / "stdout").read_text(), self.said

    def begin(self, *words: str) -> tuple[Started, dict[int, int]]:
        """Start WAITING on two ranks, one on each host; return the command and each rank's process number."""
        self.write("waiting.py", WAITING)
        with (self.folder / "stderr").open("w") as stderr:
            process = self.hosts.run(
                "--hosts", "host0,host1", "-n", "1", *words, "waiting.py",
                cwd=self.folder, stdout=subprocess.PIPE, stderr=stderr,
            )  # fmt: skip
        assert process.stdout is not None
        begun = [process.stdout.readline().split() for _ in range(2)]
        assert [words[0] for words in begun if words] == ["begun"] * 2, self.said
        return process, {int(rank): int(pid) for _, rank, pid in begun}

    @property
    def said(self) -> str:
        return (self.folder / "stderr").read_text()


@pytest.fixture
def job(ssh_hosts: SshHosts, tmp_path: Path) -> Job:
    return Job(ssh_hosts, tmp_path)


def wait_for_end(pid: int) -> bool:
    """Whether a process ends that need not be a child of this one."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    with os.fdopen(handle) as ending:
        return bool(select.select([ending], [], [], END_SECONDS)[0])


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def ssh_of(process: Started, host: str) -> int:
    """Return the process number of a command's ssh to a host."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return next(int(pid) for pid in children if host in Path(f"/proc/{pid}/cmdline").read_text().split("\0"))


def test_one_command_trains_to_the_one_rank_result(job: Job) -> None:
    exit_code, _, said = job.run("--hosts", "host0,host1:1", "-n", "2", str(TRAINING), str(job.folder), "{}")
    assert exit_code == 0, said
    reference = run_ranks(train_all, 1)[0].get()
    for rank in range(3):
        for case, got, expected in zip(CASES, torch.load(job.folder / f"{rank}.pt"), reference, strict=True):
            for name, value in expected.items():
                scale = value.abs().max().clamp(min=1e-3)
                assert ((got[name] - value).abs().max() / scale).item() < TOLERANCE, (rank, case, name)


def test_a_script_for_one_device_runs_once_and_on_the_first_host(job: Job) -> None:
    exit_code, printed, said = job.run(
        *("--hosts", "host0,host1", "-n", "1", "--auto", plain_script.__file__, str(job.folder), "3"),
        env={"RANKWISE_AUTO_SPLIT": "always"},
    )
    assert exit_code == 3, said
    assert "runs whole" not in said
    plain_script.check(job.folder, printed)


def test_ranks_of_a_module_know_where_they_are_and_the_first_failure_comes_last_and_once(job: Job) -> None:
    job.write("library/found_by_path.py", "")
    job.write("package/__init__.py", "")
    job.write(
        "package/train.py",
        """
        import json, os, sys, found_by_path, rankwise as rw
        with rw.join() as world:
            print(json.dumps([
                world.rank, world.hostname, world.node_rank, sys.argv[1:], sys.stdin.read(),
                os.environ.get("RANKWISE_CHECK"), os.environ.get("NCCL_DEBUG"), os.environ.get("MY_OWN"),
                os.environ["RANKWISE_STORE"].rpartition(":")[0], os.environ["GLOO_SOCKET_IFNAME"],
            ]))
            rw.barrier()
            if world.rank == 2:
                raise ValueError("as asked")
            rw.barrier()
        """,
    )
    env = {"PYTHONPATH": "library", "NCCL_DEBUG": "WARN", "MY_OWN": "stays here"}
    options = ("--hosts", "host0:2,root@host1", "--check", "--max-restarts", "1", "-n", "1")
    exit_code, out, said = job.run(*options, "-m", "package.train", "a b", "--c", env=env)
    assert exit_code == 1, said
    address = job.hosts.hosts.addresses[0]
    same = [["a b", "--c"], "", "1", "WARN", None, address, "eth0"]
    places = [[0, "host0", 0], [1, "host0", 0], [2, "host1", 1]]
    assert sorted(map(json.loads, out.splitlines())) == sorted([place + same for place in places] * 2)
    assert "[rankwise on host1] 1 rank on this machine" in said
    attempts = re.split(r"\[rankwise on host0\] restart 1 of 1\n", said)
    assert len(attempts) == 2
    for attempt in attempts:
        assert attempt.count("[rankwise] rank 2 of 3 (host1) failed first: ValueError: as asked, at ") == 1
        assert attempt.endswith("\nValueError: as asked\n")
    assert "node 0 shows the full report" not in said


def test_a_single_host_is_a_job_of_its_own_and_its_exit_code_comes_through(job: Job) -> None:
    job.write(
        "train.py",
        "import os; print(os.environ['RANKWISE_STORE']); print('half a line', end='', flush=True); os._exit(255)",
    )
    exit_code, out, said = job.run("--hosts", "host1", "-n", "1", "train.py")
    assert exit_code == 255, said
    assert out.startswith("127.0.0.1:")
    assert out.endswith("\nhalf a line")
    assert "was lost" not in said


def test_ctrl_c_here_ends_the_job_everywhere(job: Job) -> None:
    process, pids = job.begin()
    process.send_signal(signal.SIGINT)
    assert process.wait(END_SECONDS) == 128 + signal.SIGINT, job.said
    for rank, pid in pids.items():
        assert wait_for_end(pid)
        assert (job.folder / f"interrupted-{rank}").exists()


def test_the_ranks_end_with_the_command_that_started_them(job: Job) -> None:
    process, pids = job.begin()
    process.kill()
    for pid in pids.values():
        assert wait_for_end(pid)


def test_a_host_whose_connection_ends_takes_the_job_with_it(job: Job) -> None:
    process, pids = job.begin()
    os.kill(ssh_of(process, "host1"), signal.SIGKILL)
    assert process.wait(END_SECONDS) != 0
    assert "[rankwise] host1 was lost: its ssh exited with code -9\n" in job.said
    for pid in pids.values():
        assert wait_for_end(pid)


def test_ranks_end_with_the_process_that_ssh_has_started(job: Job) -> None:
    process, pids = job.begin()
    # A rank's parent is the fork server, whose parent is the launcher.
    os.kill(parent_of(parent_of(parent_of(pids[1]))), signal.SIGKILL)
    assert process.wait(END_SECONDS) != 0
    for pid in pids.values():
        assert wait_for_end(pid)


def test_an_elastic_job_continues_without_a_host_whose_connection_ends(job: Job) -> None:
    process, pids = job.begin("--nodes", "1:2")
    os.kill(ssh_of(process, "host1"), signal.SIGKILL)
    assert wait_for_end(pids[1])
    assert process.stdout is not None
    assert process.stdout.readline().split()[:2] == ["begun", "0"], job.said
    assert "[rankwise] host1 was lost: its ssh exited with code -9; the job continues without it\n" in job.said
    process.send_signal(signal.SIGTERM)
    assert process.wait(END_SECONDS) == 128 + signal.SIGTERM, job.said


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("host0,host2", ["LaunchError: ssh cannot connect to host2.", "port 2222: Connection refused", "host2 true\n"]),
        (
            "host0,nobody@host1",
            ["LaunchError: ssh cannot connect to host1.", "Permission denied", "nobody@host1 true\n"],
        ),
        ("host0,host1", ["ConfigurationError: Script 'nowhere.py' does not exist.", "on        host", "rsync -a"]),
    ],
)
def test_a_job_that_cannot_start_on_one_host_starts_on_none(job: Job, hosts: str, expected: list[str]) -> None:
    exit_code, out, said = job.run("--hosts", hosts, "-n", "1", "nowhere.py")
    assert (exit_code, out) == (2, "")
    for words in expected:
        assert words in said


def test_a_folder_that_is_here_only_is_named(job: Job) -> None:
    """The laptop has a folder of its own at this place."""
    only_here = 'mount -t tmpfs none "$0" && mkdir "$0/project" && cd "$0/project" && exec "$@"'
    process = job.hosts.hosts.start(
        2,
        [
            "sh", "-c", only_here, str(job.folder),
            *("rankwise", "run", "--hosts", "host0,host1", "--ssh", f"ssh -F {job.hosts.config}", "train.py"),
        ],
        {"PATH": f"{Path(os.sys.executable).parent}:{os.environ['PATH']}"},
        stderr=subprocess.PIPE,
    )  # fmt: skip
    _, said = process.communicate(timeout=END_SECONDS)
    assert process.returncode == 2
    assert f"ConfigurationError: The working directory {job.folder}/project cannot be entered: No such file" in said
    assert "on        host" in said
