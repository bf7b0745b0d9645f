# SPDX-License-Identifier: Apache-2.0
"""A rank is killed in the middle of training, the launcher starts all again, and the result is the same bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.e2e.conftest import Command

SCRIPT = """
import os, signal, sys
import torch
import rankwise as rw

with rw.join() as world:
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(37, 5).double(), torch.randn(37, 2).double())
    layers = torch.nn.Linear(5, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 2)
    model = rw.replicate(torch.nn.Sequential(*layers).double())
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    loader = rw.DataLoader(data, global_batch_size=8, shuffle=True)
    checkpoints = rw.Checkpointer("run-" + sys.argv[1], keep=2)
    checkpoints.restore(model=model, optimizer=optimizer, loader=loader)
    for epoch in range(loader.epoch, 3):
        for number, (x, y) in enumerate(loader):
            is_due = sys.argv[1] == "killed" and (epoch, number, world.rank) == (1, 2, 1)
            if is_due and not os.path.exists("was-killed"):
                open("was-killed", "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        checkpoints.save(model=model, optimizer=optimizer, loader=loader)
    rw.print([value.hex() for parameter in model.parameters() for value in parameter.flatten().tolist()])
"""


def test_a_kill_in_the_middle_changes_nothing(command: Command) -> None:
    command.write("train.py", SCRIPT)
    whole = command.run("-n", "2", "train.py", "whole")
    killed = command.run("-n", "2", "--max-restarts", "1", "train.py", "killed")
    assert (whole.returncode, killed.returncode) == (0, 0), killed.stderr
    assert "SIGKILL" in killed.stderr
    assert "restart 1 of 1" in killed.stderr
    assert whole.stdout == killed.stdout != ""
