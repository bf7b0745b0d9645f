# SPDX-License-Identifier: Apache-2.0
"""Two levels: shared memory within each host, Gloo between them; and containers, which share no memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rankwise.replicate.loss.reports import channel_length

if TYPE_CHECKING:
    from hosts import Hosts

EXCHANGING = Path(__file__).with_name("exchanging.py")
LIMIT_SECONDS = 50


@pytest.mark.parametrize(("ranks_per_host", "num_runs"), [([2, 2], 1), ([1, 2], 2), ([3, 2], 1)])
def test_large_tensors_and_gradients_are_the_same_bits_on_every_host_and_in_every_run(
    hosts: Hosts, ranks_per_host: list[int], num_runs: int
) -> None:
    found = []
    for _ in range(num_runs):
        for ended in hosts.run_ranks(EXCHANGING, ranks_per_host):
            assert ended.exit_code == 0, ended.stderr
            found.append(json.loads(ended.stdout))
    assert all(one == found[0] for one in found)
    assert found[0]["how"] == "SharedMemory"
    assert found[0]["number"] == 12 + 4 * (2 + 4 + 4) + 8 + 2 + 1


def test_the_choice_is_logged_in_one_line(hosts: Hosts) -> None:
    code = "import rankwise as rw\nwith rw.join() as world:\n    pass"
    all_ended = hosts.run_ranks(code, [2, 2])
    lines = [line for ended in all_ended for line in ended.stderr.splitlines() if "exchange: " in line]
    assert lines == ["[rankwise] exchange: shared memory between 2 ranks on each of 2 hosts, Gloo between hosts"]


def test_ranks_alone_on_their_hosts_use_gloo_and_log_the_reason(hosts: Hosts) -> None:
    code = "import rankwise as rw\nwith rw.join() as world:\n    assert rw.all_reduce(1) == 2"
    first, second = hosts.run_ranks(code, [1, 1])
    assert (first.exit_code, second.exit_code) == (0, 0), first.stderr + second.stderr
    assert "exchange: Gloo; not shared memory: no two ranks are on one host" in first.stderr


@pytest.mark.parametrize("ranks_per_host", [[2, 2], [1, 1]])
def test_with_checking_gradients_against_another_collective_are_reported_before_sending(
    hosts: Hosts, ranks_per_host: list[int]
) -> None:
    code = (
        "import torch, rankwise as rw\n"
        "with rw.join() as world:\n"
        "    model = rw.replicate(torch.nn.Linear(5, 3))\n"
        "    for step in range(3):\n"
        "        if step == 2 and world.rank == world.world_size - 1:\n"
        "            rw.all_reduce(torch.ones(2))\n"
        "        else:\n"
        "            model(torch.ones(2, 5)).sum().backward()\n"
    )
    num_ranks = sum(ranks_per_host)
    for ended in hosts.run_ranks(code, ranks_per_host, env={"RANKWISE_CHECK": "1"}):
        assert ended.exit_code == 1
        assert "CollectiveMismatch: Ranks called different collectives." in ended.stderr
        assert (
            f": loss of Linear, bucket 0: float64[{channel_length(num_ranks)}] at <string>:8 in <module>"
            in ended.stderr
        )
        assert f'rank {num_ranks - 1}: all_reduce("sum", float32[2]) at <string>:6 in <module>' in ended.stderr
        if num_ranks > 2:
            assert "on        rank 3/4 on host1, reported on every rank" in ended.stderr


def test_ranks_in_different_containers_use_gloo_and_log_the_reason(tmp_path: Path) -> None:
    code = (
        "import sys, rankwise as rw\n"
        "with rw.join(init_method=f'file://{sys.argv[1]}/store', rank=int(sys.argv[2]), world_size=2) as world:\n"
        "    assert rw.all_reduce(1) == 2\n"
    )
    ranks = [
        subprocess.Popen(
            # A process namespace of its own is what keeps one container from seeing another's processes.
            ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", code, str(tmp_path), str(rank)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=LIMIT_SECONDS)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert "exchange: Gloo; not shared memory: ranks of one host are in different containers" in said[0]
