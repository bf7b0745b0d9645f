# SPDX-License-Identifier: Apache-2.0
"""A script under ``rankwise run`` that trains without joining: reported in its first step and at the end, once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.e2e.conftest import Command

STEP = "rank 0 has taken an optimizer step without joining the other ranks: 2 ranks each train alone"
END = "[rankwise] the script never joined: 2 ranks each trained alone; "
TRAIN = """
import os, sys, torch
{first}
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(3):
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if os.environ["RANK"] == "0":
        print("step", step, file=sys.stderr)
{last}
"""


def test_a_script_that_never_joins_is_reported_in_its_first_step_and_at_the_end(command: Command) -> None:
    command.write("train.py", TRAIN.format(first="", last=""))
    ended = command.run("-n", "2", "train.py")
    assert ended.returncode == 0
    lines = [line for line in ended.stderr.splitlines() if "CPU thread" not in line]
    assert STEP in lines[0], lines
    assert lines[0].startswith("[rank 0/2] [rankwise] warning: ")
    assert "rankwise.join()" in lines[0]
    assert "rankwise run -n 1" in lines[0]
    assert [line.rpartition("] ")[2] for line in lines[1:4]] == ["step 0", "step 1", "step 2"]
    assert lines[4].startswith(END)
    assert "2 ranks finished in " in lines[5]
    assert len(lines) == 6


REFERENCE_FIRST = """
import os, torch
def train(model, steps=2):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        model(torch.ones(3, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
train(torch.nn.Linear(2, 1))
"""


@pytest.mark.parametrize(
    "after",
    [
        "import rankwise as rw\nwith rw.join():\n    train(rw.replicate(torch.nn.Linear(2, 1)))",
        "import rankwise as rw\nwith rw.join():\n    rw.barrier()",
        (
            "torch.distributed.init_process_group('gloo')\n"
            "train(torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1)))\n"
            "torch.distributed.destroy_process_group()"
        ),
    ],
)
def test_a_script_that_joins_after_a_reference_is_not_said_to_have_never_joined(command: Command, after: str) -> None:
    command.write("train.py", REFERENCE_FIRST + after)
    ended = command.run("-n", "2", "train.py")
    assert ended.returncode == 0, ended.stderr
    assert STEP in ended.stderr
    assert "never joined" not in ended.stderr


def test_a_failure_of_such_a_script_is_still_the_last_thing_that_is_shown(command: Command) -> None:
    command.write("train.py", TRAIN.format(first="", last="raise ValueError('boom')"))
    ended = command.run("-n", "2", "train.py")
    assert ended.returncode == 1
    assert ended.stderr.count(END) == 1
    assert ended.stderr.endswith("ValueError: boom\n")


JOINED = """
import rankwise as rw
world = rw.join()
"""
GROUP = """
torch.distributed.init_process_group("gloo")
torch.distributed.barrier()  # a rank that ends sooner takes away the connections that another is still opening
import atexit
atexit.register(torch.distributed.destroy_process_group)
"""
RPC = """
import torch.distributed.rpc as rpc
import atexit
rpc.init_rpc(os.environ["RANK"], rank=int(os.environ["RANK"]), world_size=2)
atexit.register(rpc.shutdown)
"""
HOROVOD = """
import types
sys.modules["horovod"] = types.ModuleType("horovod")
"""
FORKED = """
pid = os.fork()
if pid:
    os.waitpid(pid, 0)
    os._exit(0)
"""
NO_GRADIENTS = """
torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1).step()
"""


@pytest.mark.parametrize(
    "first", [JOINED, GROUP, RPC, HOROVOD, FORKED], ids=["join", "group", "rpc", "horovod", "forked"]
)
def test_no_report_for(command: Command, first: str) -> None:
    command.write("train.py", TRAIN.format(first=first, last=""))
    ended = command.run("-n", "2", "train.py")
    assert ended.returncode == 0, ended.stderr
    assert "alone" not in ended.stderr


def test_no_report_with_one_rank(command: Command) -> None:
    command.write("train.py", TRAIN.format(first="", last=""))
    ended = command.run("-n", "1", "train.py")
    assert (ended.returncode, ended.stderr) == (0, "step 0\nstep 1\nstep 2\n")


def test_a_step_that_changes_nothing_is_not_training(command: Command) -> None:
    command.write("train.py", TRAIN.format(first=NO_GRADIENTS + JOINED, last=""))
    ended = command.run("-n", "2", "train.py")
    assert ended.returncode == 0, ended.stderr
    assert "alone" not in ended.stderr
