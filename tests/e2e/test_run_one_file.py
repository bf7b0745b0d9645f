# SPDX-License-Identifier: Apache-2.0
"""Several ranks under ``rankwise run`` that write one file are noticed, and reported once; other files are not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.e2e.conftest import Command

WORDS = "ranks 0 and 1 have both opened {} for writing"
HEAD = """
import json, os, sys, tempfile, pathlib
import numpy as np, torch
rank = int(os.environ["RANK"])
torch.set_num_threads(1)
"""
WRITES = {
    "open": 'open("out.txt", "w").close()',
    "pathlib": 'pathlib.Path("out.txt").write_text("a")',
    "bytes": 'open(b"out.txt", "wb").close()',
    "np.save": 'np.save("out.npy", np.ones(2))',
    "torch.save": 'torch.save(torch.ones(2), "out.pt")',
    "torch.save to a path": 'torch.save(torch.nn.Linear(2, 2).state_dict(), pathlib.Path("out.pt"))',
    "by two names": 'os.symlink(".", f"way{rank}"); open(f"way{rank}/out.txt", "w").close()',
}
SILENT = {
    "one rank": 'rank == 0 and open("out.txt", "w").close()',
    "its own file": 'open(f"out-{rank}.txt", "w").close(); torch.save(torch.ones(2), f"out-{rank}.pt")',
    "its own folder": 'os.mkdir(f"r{rank}"); os.chdir(f"r{rank}"); open("out.txt", "w").close()',
    "appending": 'open("log.txt", "a").write("line"); open("log.txt").read()',
    "in place": 'os.close(os.open("in", os.O_CREAT | os.O_WRONLY)); open("in", "r+").close()',
    "no file": 'open(os.devnull, "w").close(); open("/dev/stdout", "w").close(); open("/proc/self/comm", "w").close()',
    "a lock": 'open("data.lock", "w").close(); os.close(os.open("other", os.O_CREAT | os.O_TRUNC | os.O_WRONLY))',
    "a cache": 'os.makedirs(".cache/lib", exist_ok=True); open(".cache/lib/fonts.json", "w").close()',
    "temporary": (
        'tempfile.NamedTemporaryFile("w").write("a"); '
        'tempfile.TemporaryFile("w").write("a"); open(tempfile.mktemp(), "w").close()'
    ),
    "in memory": "import io; torch.save(torch.ones(2), io.BytesIO())",
    "our checkpoints": (
        "import rankwise as rw\nwith rw.join() as world:\n"
        "    model = rw.replicate(torch.nn.Linear(2, 2))\n"
        '    rw.Checkpointer("runs").save(model=model)\n'
        '    rw.save("one", model=model)\n'
        '    rw.save_weights("weights.safetensors", model)'
    ),
}


@pytest.mark.parametrize("how", WRITES)
def test_a_file_that_two_ranks_write_is_reported_once(command: Command, how: str) -> None:
    command.write("train.py", f"{HEAD}\n{WRITES[how]}\n{WRITES[how].replace('out', 'again').replace('way', 'road')}")
    ended = command.run("-n", "2", "train.py")
    assert ended.returncode == 0, ended.stderr
    (line,) = [line for line in ended.stderr.splitlines() if "for writing" in line]
    assert "have both opened" in line
    assert "out." in line or "again." in line
    assert "if world.rank == 0:" in line


@pytest.mark.parametrize("how", SILENT)
def test_no_report_for(command: Command, how: str) -> None:
    command.write("train.py", f"{HEAD}\n{SILENT[how]}")
    ended = command.run("-n", "2", "train.py")
    assert ended.returncode == 0, ended.stderr
    assert "for writing" not in ended.stderr


def test_a_function_that_is_launched_is_followed_too(command: Command) -> None:
    command.write("work.py", 'def work():\n    open("out.txt", "w").close()')
    command.write("train.py", f"{HEAD}\nfrom work import work\nwork()")
    ended = command.run("-n", "2", "train.py")
    assert ended.stderr.count(WORDS.format("out.txt")) == 1


def test_a_restart_may_write_what_the_ranks_before_it_wrote(command: Command) -> None:
    text = 'attempt = int(os.environ["RANKWISE_ATTEMPT"])\nopen(f"{(rank + attempt) % 2}.txt", "w").close()'
    command.write("train.py", f"{HEAD}\n{text}\nassert attempt == 1")
    ended = command.run("-n", "2", "--max-restarts", "1", "train.py")
    assert ended.returncode == 0, ended.stderr
    assert "for writing" not in ended.stderr
