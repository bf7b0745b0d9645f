# SPDX-License-Identifier: Apache-2.0
"""Horovod's timeline: by the variable, by horovodrun's option, and by the script."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Command

TRAIN = """
import sys
import torch
import horovod.torch as hvd

hvd.init()
model = torch.nn.Linear(3, 2)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

def train(num_steps):
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()

train(3)
for number in sys.argv[1:]:
    hvd.start_timeline(f"{number}.json")
    train(20)
    hvd.allreduce(torch.ones(3), name="seen")
    hvd.stop_timeline()
train(2)
"""


def _events(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8"))["traceEvents"]


def _steps(events: list[dict[str, Any]]) -> dict[int, int]:
    """Return how many steps each rank has taken."""
    found: dict[int, int] = {}
    for event in events:
        if event["ph"] == "X" and event["name"].startswith("step "):
            found[event["pid"]] = found.get(event["pid"], 0) + 1
    return found


def _check(events: list[dict[str, Any]], num_steps: int) -> None:
    assert _steps(events) == {0: num_steps, 1: num_steps}
    for rank in (0, 1):
        parts = [one["name"] for one in events if one["ph"] == "X" and (one["pid"], one["tid"]) == (rank, 2)]
        # Each step in detail, not one in many.
        assert parts.count("backward") >= num_steps
        assert parts.count("optimizer") >= num_steps
    times = [event["ts"] for event in events if "ts" in event]
    assert min(times) > -1
    assert any(event["ph"] == "s" for event in events)


def test_the_variable_and_the_option_write_a_timeline_of_the_whole_job(command: Command) -> None:
    command.write("train.py", TRAIN)
    done = command.rankwise("horovodrun", "-np", "2", "--timeline-filename", "out/a.json", "python", "train.py")
    assert done.returncode == 0, done.stderr
    assert "timeline of 2 ranks: out/a.json" in done.stderr
    _check(_events(command.folder / "out" / "a.json"), 5)
    done = command.rankwise("horovodrun", "-np", "2", "python", "train.py", env={"HOROVOD_TIMELINE": "b.json"})
    assert done.returncode == 0, done.stderr
    _check(_events(command.folder / "b.json"), 5)


def test_a_script_starts_and_stops_timelines(command: Command) -> None:
    command.write("train.py", TRAIN)
    done = command.rankwise("horovodrun", "-np", "2", "python", "train.py", "1", "2")
    assert done.returncode == 0, done.stderr
    for name in ("1.json", "2.json"):
        events = _events(command.folder / name)
        _check(events, 20)
        assert sum("seen" in event["name"] for event in events) >= 2


ONLY_ZERO = """
import horovod.torch as hvd
hvd.init()
if hvd.rank() == 0:
    hvd.start_timeline("t.json")
    hvd.start_timeline("ignored.json")
hvd.barrier()
hvd.shutdown()
print("ended")
"""


def test_a_timeline_that_one_rank_starts_is_of_that_rank(command: Command) -> None:
    command.write("train.py", ONLY_ZERO)
    done = command.rankwise("horovodrun", "-np", "2", "python", "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ended") == 2
    assert "1 of 2 ranks are missing in the timeline: have they started it too?" in done.stderr
    assert {event["pid"] for event in _events(command.folder / "t.json")} == {0}
    assert not (command.folder / "ignored.json").exists()


KILLED = """
import os
import signal
import torch
import rankwise.compat.horovod as hvd

hvd.init()
hvd.start_timeline("t.json")
hvd.allreduce(torch.ones(3))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_rank_leaves_no_file_of_its_timeline(command: Command) -> None:
    command.write("train.py", KILLED)
    temporary = command.folder / "temporary"
    temporary.mkdir()
    done = command.python("train.py", env={"TMPDIR": str(temporary)})
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"HOROVOD_TIMELINE": "/proc/none/t.json"}, "The timeline /proc/none/t.json cannot be written"),
        (
            {"HOROVOD_TIMELINE": "t.json", "RANKWISE_REPORT": "off"},
            "A timeline needs the times of steps, which are not measured.",
        ),
    ],
)
def test_what_prevents_a_timeline_is_said_before_training(command: Command, given: dict[str, str], words: str) -> None:
    command.write("train.py", TRAIN)
    done = command.rankwise("horovodrun", "-np", "2", "python", "train.py", env=given)
    assert done.returncode != 0
    assert words in done.stderr
