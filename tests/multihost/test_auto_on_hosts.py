# SPDX-License-Identifier: Apache-2.0
"""``rankwise run --auto`` on two hosts whose link is cut: the job ends, and what was lost is named."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import rankwise

if TYPE_CHECKING:
    from hosts import Hosts

TRAIN = """
import sys
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
for number in range(10**9):
    model(torch.randn(8, 3)).square().mean().backward()
    if number == 4:
        open(sys.argv[1] + "/begun", "x").close()
"""


def _words(folder: Path, way: str, address: str, host: int) -> tuple[list[str], dict[str, str]]:
    script = [str(folder / "train.py"), str(folder)]
    env = {
        "PYTHONPATH": str(Path(rankwise.__file__).parents[1]),
        "RANKWISE_SECRET": "of this test",
        "RANKWISE_AUTO_SPLIT": "always",
        "OMP_NUM_THREADS": "1",
    }
    if way == "rankwise run":
        nodes = ["--nodes", "2", "--node-rank", str(host), "--rendezvous", f"{address}:29400"]
        return [sys.executable, "-m", "rankwise", "run", "-n", "1", *nodes, "--auto", *script], env
    variables = {"MASTER_ADDR": address, "MASTER_PORT": "29500", "RANK": str(host), "WORLD_SIZE": "2"}
    return [sys.executable, "-m", "rankwise.auto", *script], {**env, **variables}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("way", ["rankwise run"])
def test_a_cut_link_ends_the_job(hosts: Hosts, tmp_path: Path, way: str) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    started = []
    for host in range(2):
        words, env = _words(tmp_path, way, hosts.addresses[0], host)
        with (tmp_path / f"{host}.err").open("w") as file:
            started.append(hosts.start(host, words, env, stdout=file, stderr=file))
    while not (tmp_path / "begun").exists():
        assert all(one.poll() is None for one in started), (tmp_path / "0.err").read_text()
        time.sleep(0.02)
    hosts.link(1, up=False)
    codes = [one.wait(120) for one in started]
    said = [(tmp_path / f"{host}.err").read_text() for host in range(2)]
    assert all(codes), said
    assert "rank 1 of 2 failed first: host1 was lost" in said[0], said[0]
    assert "Traceback" not in said[1]
