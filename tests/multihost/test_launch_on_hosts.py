# SPDX-License-Identifier: Apache-2.0
"""``rankwise.launch`` called on two hosts: one job, each caller with its own ranks' values, one blame for both."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from hosts import Hosts

PROGRAM = """
import sys
import torch
import rankwise as rw

class Odd(Exception):
    pass

def train():
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(29, 3).double(), torch.randn(29, 1).double())
    with rw.join() as world:
        model = rw.replicate(torch.nn.Linear(3, 1).double())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        loader = rw.DataLoader(data, global_batch_size=7, shuffle=True)
        for _ in range(2):
            for x, y in loader:
                torch.nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
        return world.rank, world.num_nodes, torch.cat([p.detach().flatten() for p in model.parameters()])

def fail(blamed):
    with rw.join() as world:
        if world.rank == blamed:
            raise Odd(f"rank {blamed} gives up")
        rw.barrier()

number = int(sys.argv[1])
on_both = rw.launcher(ranks=2, num_nodes=2, node_rank=number, rendezvous="198.18.0.1:29500")(train)
_, _, alone = train()
print([(rank, nodes, torch.allclose(value, alone, rtol=1e-10, atol=0)) for rank, nodes, value in on_both()])
try:
    rw.launch(fail, 3, ranks=2, num_nodes=2, node_rank=number, rendezvous="198.18.0.1:29501")
except Exception as error:
    print(type(error) is Odd, str(error).splitlines()[0])
"""


def test_each_host_gets_its_own_ranks_values_and_both_the_blame(hosts: Hosts, tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM, encoding="utf-8")
    started = [
        hosts.start(
            index,
            [sys.executable, str(program), str(index)],
            {"RANKWISE_SECRET": "of this test"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for index in range(2)
    ]
    (first, said_first), (second, said_second) = [one.communicate(timeout=80) for one in started]
    assert first.splitlines()[0] == "[(0, 2, True), (1, 2, True)]", said_first
    assert second.splitlines()[0] == "[(2, 2, True), (3, 2, True)]", said_second
    assert first.splitlines()[1].startswith("False Rank 3 failed: "), first
    assert second.splitlines()[1:] == ["True rank 3 gives up"]
