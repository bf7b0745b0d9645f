# SPDX-License-Identifier: Apache-2.0
"""Ranks of ``rankwise run`` find every variable that torchrun gives its own, and each launcher knows its ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.e2e.conftest import Command

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
WRITE_VARIABLES = """
    import json, os
    with open(f"{os.environ['NAME']}-{os.environ['RANK']}.json", "w") as file:
        json.dump(dict(os.environ), file)
"""
JOIN = """
    import os, subprocess, sys, torch, rankwise as rw
    if "inner" not in sys.argv:
        words = [sys.executable, *{torchrun!r}, "train.py", "inner"]
        if os.environ["RANK"] == "0":
            subprocess.run(words, check=True)
    with rw.join() as world:
        total = rw.all_reduce(torch.ones(1, dtype=torch.int64)).item()
        sys.stdout.write(f"{{world.source}} {{world.rank}} {{world.world_size}} {{total}}\\n")
"""


def test_a_rank_has_the_names_and_numbers_that_torchrun_gives(command: Command) -> None:
    command.write("show.py", WRITE_VARIABLES)
    ended = command.run("-n", "2", "--max-restarts", "3", "show.py", env={"NAME": "own", "ROLE_RANK": "outer"})
    assert ended.returncode == 0, ended.stderr
    words = [sys.executable, *TORCHRUN, "--max-restarts", "3", "show.py"]
    subprocess.run(words, cwd=command.folder, env=command.environment(NAME="torchrun"), check=True, timeout=80)
    for rank in range(2):
        own = json.loads((command.folder / f"own-{rank}.json").read_text())
        theirs = json.loads((command.folder / f"torchrun-{rank}.json").read_text())
        # The signals are the agent's own: torchrun tells itself by a variable which to pass on.
        before = {*command.environment(), "TORCHELASTIC_SIGNALS_TO_HANDLE"}
        given = {name for name in theirs if name not in before}
        assert "TORCHELASTIC_RUN_ID" in given
        assert given - own.keys() == set()
        different = {"NAME", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"}
        same = given - different - {"OMP_NUM_THREADS"}
        assert {name: own[name] for name in same} == {name: theirs[name] for name in same}


def test_a_restart_is_counted(command: Command) -> None:
    command.write(
        "train.py",
        """
        import os
        count = os.environ["TORCHELASTIC_RESTART_COUNT"]
        print(count, os.environ["TORCHELASTIC_MAX_RESTARTS"])
        assert count == "1"
        """,
    )
    ended = command.run("-n", "1", "--max-restarts", "2", "train.py")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "0 2\n1 2\n"


def test_a_script_of_torch_elastic_fails_with_its_own_error(command: Command) -> None:
    command.write(
        "train.py",
        """
        from torch.distributed.elastic.multiprocessing.errors import record

        @record
        def main():
            raise ValueError("the learning rate is negative")

        main()
        """,
    )
    ended = command.run("-n", "2", "train.py")
    assert ended.returncode == 1
    assert "ValueError: the learning rate is negative" in ended.stderr


def test_a_torchrun_inside_a_rank_has_ranks_of_its_own(command: Command) -> None:
    command.write("train.py", JOIN.format(torchrun=TORCHRUN))
    ended = command.run("-n", "2", "train.py")
    assert ended.returncode == 0, ended.stderr
    expected = [f"{source} {rank} 2 2" for source in ("rankwise", "torchrun") for rank in range(2)]
    assert sorted(ended.stdout.splitlines()) == expected


def test_a_launch_inside_a_rank_has_ranks_of_its_own(command: Command) -> None:
    command.write("train.py", JOIN.format(torchrun=["-m", "rankwise", "run", "-n", "3"]))
    ended = command.run("-n", "2", "train.py")
    assert ended.returncode == 0, ended.stderr
    expected = [*(f"rankwise {rank} 2 2" for rank in range(2)), *(f"rankwise {rank} 3 3" for rank in range(3))]
    assert sorted(ended.stdout.splitlines()) == sorted(expected)


def test_env_names_rankwise_and_not_torchrun(command: Command) -> None:
    command.write(
        "train.py",
        """
        import subprocess, sys
        subprocess.run([sys.executable, "-m", "rankwise", "env"], check=True)
        """,
    )
    ended = command.run("-n", "1", "train.py")
    assert ended.returncode == 0, ended.stderr
    assert "RANKWISE_RUN_ID is set, as only rankwise's launcher does" in ended.stdout
    assert "TORCHELASTIC_RUN_ID is set, but torchrun did not start this process" in ended.stdout
