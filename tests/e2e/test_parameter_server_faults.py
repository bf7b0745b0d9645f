# SPDX-License-Identifier: Apache-2.0
"""Parameter servers under ``rankwise run``: what comes of killing, halting and asking to stop."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.e2e.conftest import Command

TRAIN = """
import os, signal, sys, torch
from torch import nn
from torch.utils.data import TensorDataset
import rankwise as rw
from rankwise.comm.session import current

mode, victim, harm = sys.argv[1], int(sys.argv[2]), sys.argv[3]

def hurt():
    if harm == "kill" and not os.path.exists("hurt"):
        open("hurt", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    if harm == "halt":
        store.set("halted", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    if harm == "ask" and not os.path.exists("hurt"):
        open("hurt", "w").close()
        os.kill(os.getppid(), signal.SIGUSR2)
        os.kill(os.getpid(), signal.SIGUSR2)

with rw.join() as world:
    store = current().store
    torch.manual_seed(0)
    model = nn.Linear(8, 4).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    bound = {"mode": "async", "max_staleness": 2} if mode == "stale" else {"mode": mode}
    server = rw.parameter_server(model, optimizer, directory=f"state-{mode}", save_every=5, **bound)
    data = TensorDataset(torch.randn(60, 8).double(), torch.randn(60, 4).double())
    loader = rw.DataLoader(data, global_batch_size=6, shuffle=True)
    server.restore(loader)
    num_steps = 0
    for epoch in range(loader.epoch, 3):
        for x, y in loader:
            if num_steps == 17 and world.rank == victim:
                hurt()
            ((model(x) - y) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            num_steps += 1
        if epoch == 1 and server.is_server and world.rank == victim:
            hurt()
    if harm == "halt" and world.rank == 0:
        os.kill(int(store.get("halted", 30)), signal.SIGCONT)
    print(f"rank {world.rank}: {num_steps} steps, {float(model.weight.detach().sum()):.15f}")
"""
ALL_STEPS = 30


def _sums(stdout: str) -> dict[str, str]:
    return {line.split(":")[0]: line.split(", ")[1] for line in sorted(stdout.splitlines())}


def _undisturbed(command: Command) -> dict[str, str]:
    command.write("train.py", TRAIN)
    whole = command.run("-n", "3", "train.py", "sync", "9", "none")
    assert whole.returncode == 0, whole.stderr
    shutil.rmtree(command.folder / "state-sync")
    sums = _sums(whole.stdout)
    assert len(set(sums.values())) == 1
    return sums


@pytest.mark.parametrize("victim", [1, 2])
def test_sync_ends_with_any_rank_and_starts_again_from_its_last_state(command: Command, victim: int) -> None:
    sums = _undisturbed(command)
    ended = command.run("-n", "3", "train.py", "sync", str(victim), "kill")
    assert ended.returncode == 137
    assert f"rank {victim} of 3 (" in ended.stderr
    assert "failed first: killed by SIGKILL" in ended.stderr
    assert "Exception ignored" not in ended.stderr
    (command.folder / "hurt").unlink()
    shutil.rmtree(command.folder / "state-sync")
    again = command.run("-n", "3", "--max-restarts", "1", "train.py", "sync", str(victim), "kill")
    assert again.returncode == 0, again.stderr
    assert "continue from update" in again.stderr
    assert _sums(again.stdout) == sums, "to the bit"


def test_a_sync_job_that_is_asked_to_stop_saves_its_state(command: Command) -> None:
    sums = _undisturbed(command)
    asked = command.run("-n", "3", "train.py", "sync", "1", "ask")
    assert asked.returncode == 75, asked.stderr
    assert not asked.stdout
    again = command.run("-n", "3", "train.py", "sync", "9", "none")
    assert _sums(again.stdout) == sums


@pytest.mark.parametrize(("mode", "harm"), [("async", "kill"), ("stale", "kill"), ("async", "halt")])
def test_async_continues_without_a_worker(command: Command, mode: str, harm: str) -> None:
    command.write("train.py", TRAIN)
    ended = command.run("-n", "3", "train.py", mode, "1", harm)
    assert ended.returncode == 0, ended.stderr
    lines = {line.split(":")[0]: int(line.split()[2]) for line in ended.stdout.splitlines()}
    if harm == "kill":
        assert lines == {"rank 0": ALL_STEPS, "rank 2": 0}
        assert "[rankwise] rank 1 failed (SIGKILL); the others continue without it" in ended.stderr
        assert "worker 1 was lost" in ended.stderr
    else:
        assert lines == {"rank 0": ALL_STEPS, "rank 1": ALL_STEPS, "rank 2": 0}


def test_async_ends_with_its_server_and_starts_again_from_its_last_state(command: Command) -> None:
    command.write("train.py", TRAIN)
    ended = command.run("-n", "3", "train.py", "async", "2", "kill")
    assert ended.returncode == 137
    assert "rank 2 of 3 (" in ended.stderr
    (command.folder / "hurt").unlink()
    again = command.run("-n", "3", "--max-restarts", "1", "train.py", "async", "2", "kill")
    assert again.returncode == 0, again.stderr
    assert "continue from update" in again.stderr
    assert len(_sums(again.stdout)) == len(range(3))
