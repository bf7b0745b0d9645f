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

def total(blamed):
    with rw.join() as world:
        if world.rank == blamed:
            raise Odd(f"rank {blamed} gives up")
        return world.rank, world.num_nodes, rw.all_reduce(torch.tensor([2.0 ** world.rank])).item()

def launch(blamed, port):
    return rw.launch(
        total, blamed, ranks=2, num_nodes=2, node_rank=int(sys.argv[1]), rendezvous=f"198.18.0.1:{port}"
    )

print(launch(None, 29500))
try:
    launch(3, 29501)
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
    (first, said_first), (second, said_second) = [one.communicate(timeout=55) for one in started]
    assert first.splitlines()[0] == "[(0, 2, 15.0), (1, 2, 15.0)]", said_first
    assert second.splitlines()[0] == "[(2, 2, 15.0), (3, 2, 15.0)]", said_second
    assert first.splitlines()[1].startswith("False Rank 3 failed: "), first
    assert second.splitlines()[1:] == ["True rank 3 gives up"]
