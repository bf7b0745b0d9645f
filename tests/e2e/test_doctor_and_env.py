# SPDX-License-Identifier: Apache-2.0
"""``rankwise doctor`` and ``rankwise env`` as a person types them, alone and under launchers."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from rankwise.doctor.checks import SHARED_MEMORY

if TYPE_CHECKING:
    from tests.e2e.conftest import Command

RANKWISE = [sys.executable, "-m", "rankwise"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2"]
LAUNCHERS = {
    "rankwise": [*RANKWISE, "run", "-n", "2", "--device", "cpu", "-m", "rankwise"],
    "torchrun": [*TORCHRUN, "-m", "rankwise"],
    "openmpi": [*MPIRUN, *RANKWISE],
}


def run(command: Command, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command line to its end, in the command's folder."""
    if words[0] == sys.executable:
        return command.python(*words[1:], env=env)
    return run_afresh(command, *words, **env)


def run_afresh(command: Command, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command line to its end in a process that imports what it needs."""
    return subprocess.run(
        words,
        cwd=command.folder,
        env=command.environment(**env),
        capture_output=True,
        text=True,
        check=False,
        timeout=80,
    )


def findings(read: dict[str, Any]) -> dict[str, str]:
    """Return the level of each check."""
    return {finding["check"]: finding["level"] for finding in read["findings"]}


def test_a_machine_is_examined_alone(command: Command) -> None:
    ended = run(command, *RANKWISE, "doctor", "--shared", ".", "--json", "--port", "0")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    read = json.loads(ended.stdout)
    assert set(findings(read).values()) <= {"ok", "warning"}
    assert set(findings(read)) == {
        *("versions", "GPUs", "network", "own name", "ports", SHARED_MEMORY, "open files", "processes", "threads"),
        "shared folder",
    }
    assert list(command.folder.iterdir()) == []


def test_an_error_is_the_exit_code_and_a_line(command: Command) -> None:
    ended = run(command, *RANKWISE, "doctor", "--shared", "nowhere", RANK="0")
    assert ended.returncode == 1
    lines = ended.stdout.splitlines()
    assert lines[0].startswith("rankwise doctor: this machine, ")
    assert (
        "  error    launcher       cannot tell what started this process: The variables of plain env:// variables"
        in (ended.stdout)
    )
    assert "does not share nowhere with rank 0: No such file or directory" in ended.stdout
    assert lines[-1].startswith("2 errors")


@pytest.mark.parametrize("launcher", sorted(LAUNCHERS))
def test_the_ranks_of_any_launcher_are_examined_together(command: Command, launcher: str) -> None:
    ended = run(command, *LAUNCHERS[launcher], "doctor", "--json", "--shared", ".")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    read = json.loads(ended.stdout)
    assert [(facts["rank"], facts["world_size"], facts["source"]) for facts in read["ranks"]] == [
        (0, 2, launcher),
        (1, 2, launcher),
    ]
    assert len({facts["machine"]["versions"]["torch"] for facts in read["ranks"]}) == 1
    assert all(timing["seconds"] > 0 for timing in read["timings"])
    assert findings(read)["shared folder"] == "ok"
    assert "error" not in findings(read).values()
    assert list(command.folder.iterdir()) == []


@pytest.mark.parametrize("launcher", sorted(LAUNCHERS))
def test_env_shows_each_rank_its_launcher(command: Command, launcher: str) -> None:
    ended = run(command, *LAUNCHERS[launcher], "env", "--json")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    told = sorted((json.loads(line) for line in ended.stdout.splitlines()), key=lambda one: one["decided"]["rank"])
    assert [(one["decided"]["rank"], one["decided"]["world_size"], one["decided"]["source"]) for one in told] == [
        (0, 2, launcher),
        (1, 2, launcher),
    ]
    assert {row["name"] for row in told[0]["rows"] if row["verdict"] == "found"} == {launcher}


def test_env_in_a_shell_is_a_world_of_one_and_imports_no_torch(command: Command) -> None:
    code = "import sys; from rankwise.cli import main; code = main(['env']); print(code, 'torch' in sys.modules)"
    ended = run_afresh(command, sys.executable, "-c", code, RANKWISE_SECRET="plum-tree-17")  # noqa: S106
    assert ended.stdout.startswith("rank 0 of 1, no launcher: a world of one rank\n"), ended.stderr
    assert ended.stdout.endswith("RANKWISE_SECRET is set\n0 False\n")
    assert "plum-tree-17" not in ended.stdout + ended.stderr


def test_env_says_what_contradicts(command: Command) -> None:
    ended = run(command, *RANKWISE, "env", RANK="0", WORLD_SIZE="2", PMI_RANK="1", PMI_SIZE="2")
    assert ended.returncode == 1
    assert ended.stdout.startswith("undecided; the script would fail with:\n  plain env:// variables and PMI disagree")
