# SPDX-License-Identifier: Apache-2.0
"""Ranks on several hosts: who is where, the promise, and a rank that is killed."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from hosts import Hosts
from training import CASES, Parameters, train_all

from rankwise.testing import run_ranks

if TYPE_CHECKING:
    from tests.warm import WarmPython

TRAINING = Path(__file__).with_name("training.py")
TOLERANCE = 1e-10
LIMIT_SECONDS = 5.0
EVERY_JOIN = pytest.mark.parametrize("join", [{"exchange": "shared_memory"}, {"exchange": "gloo"}])
"""The keyword arguments of ``rankwise.join`` that are to come to the same."""
SAY_WHAT_CAME = """
import json, torch, rankwise as rw
with rw.join() as world:
    print(json.dumps({
        "who": [world.rank, world.local_rank, world.local_world_size, world.node_rank, world.num_nodes],
        "hostname": world.hostname,
        "sum": rw.all_reduce(torch.tensor([2.0 ** world.rank, 1.0])).tolist(),
        "all": [row.tolist() for row in rw.all_gather(torch.tensor([world.rank, world.node_rank]))],
        "from each": [rw.broadcast(torch.tensor([world.rank]), source).item() for source in range(world.world_size)],
    }))
"""

JOIN_AGAIN = """
import os, rankwise as rw
first_port = int(os.environ["MASTER_PORT"])
for number in range(3):
    os.environ["MASTER_PORT"] = str(first_port + number)
    with rw.join():
        rw.barrier()
"""

MAKE_A_FILE_ON_EACH_HOST = """
import pathlib, sys, rankwise as rw
with rw.join(timeout_seconds=30) as world:
    first_ranks = rw.new_group([0, 2])
    made = pathlib.Path(sys.argv[1], world.hostname)
    with rw.local_rank_zero_first():
        print(made.exists())
        if first_ranks.rank is not None:
            # Returns only where the first rank of either host is in the block.
            rw.barrier(group=first_ranks)
            made.touch()
"""


def largest_difference(left: Parameters, right: Parameters) -> float:
    """Return the largest difference, relative to the largest element of each tensor."""
    return max(((left[k] - right[k]).abs().max() / right[k].abs().max().clamp(min=1e-3)).item() for k in right)


@pytest.mark.parametrize("ranks_per_host", [[2, 2], [1, 2]])
def test_ranks_know_their_host_and_exchange_tensors_with_all(hosts: Hosts, ranks_per_host: list[int]) -> None:
    places = [(host, local) for host, count in enumerate(ranks_per_host) for local in range(count)]
    for rank, ended in enumerate(hosts.run_ranks(SAY_WHAT_CAME, ranks_per_host)):
        assert ended.exit_code == 0, ended.stderr
        host, local_rank = places[rank]
        assert json.loads(ended.stdout) == {
            "who": [rank, local_rank, ranks_per_host[host], host, 2],
            "hostname": f"host{host}",
            "sum": [2.0 ** len(places) - 1, len(places)],
            "all": [[number, host] for number, (host, _) in enumerate(places)],
            "from each": list(range(len(places))),
        }


def test_the_first_rank_of_each_host_goes_first(hosts: Hosts, tmp_path: Path) -> None:
    all_ended = hosts.run_ranks(MAKE_A_FILE_ON_EACH_HOST, 2, str(tmp_path))
    assert [ended.exit_code for ended in all_ended] == [0] * 4, "\n".join(ended.stderr for ended in all_ended)
    assert [ended.stdout for ended in all_ended] == ["False\n", "True\n"] * 2


def test_a_world_can_be_left_and_joined_again_over_a_long_way(warm_python: WarmPython) -> None:
    # The store goes with rank 0 before the others have heard of their own departure.
    with Hosts(3, delay_seconds=0.05, python=warm_python) as far_apart:
        for ended in far_apart.run_ranks(JOIN_AGAIN, 1):
            assert ended.exit_code == 0, ended.stderr


@EVERY_JOIN
@pytest.mark.parametrize("ranks_per_host", [[2, 2], [1, 2]])
def test_ranks_on_hosts_train_to_the_one_rank_result(
    hosts: Hosts, tmp_path: Path, ranks_per_host: list[int], join: dict[str, str]
) -> None:
    reference = run_ranks(train_all, 1)[0].get()
    for rank, ended in enumerate(hosts.run_ranks(TRAINING, ranks_per_host, str(tmp_path), json.dumps(join))):
        assert ended.exit_code == 0, ended.stderr
        trained = torch.load(tmp_path / f"{rank}.pt")
        for case, got, expected in zip(CASES, trained, reference, strict=True):
            assert largest_difference(got, expected) < TOLERANCE, (rank, case)


@EVERY_JOIN
@pytest.mark.parametrize("killed", [2, 3])
def test_a_rank_killed_on_another_host_is_named_within_five_seconds(
    hosts: Hosts, tmp_path: Path, killed: int, join: dict[str, str]
) -> None:
    all_ended = hosts.run_ranks(TRAINING, 2, str(tmp_path), json.dumps(join), str(killed))
    assert all_ended[killed].exit_code == -signal.SIGKILL, all_ended[killed].stderr
    for rank in {0, 1, 2, 3} - {killed}:
        assert all_ended[rank].exit_code == 1, all_ended[rank].stderr
        assert (tmp_path / f"{rank}.json").exists(), f"no PeerMissing on rank {rank}: {all_ended[rank].stderr}"
        found = json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8"))
        assert found["ranks"] == [killed]
        assert f"rank {killed}" in found["text"]
        assert found["seconds"] < LIMIT_SECONDS
