# SPDX-License-Identifier: Apache-2.0
"""Two worker groups, each the two ranks of a host: what they come to, and how much the link between hosts carries."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hosts import Hosts

WIDTH = 700
NUM_STEPS = 24
EVERY = 8
MEGABYTES = 4 * (WIDTH * WIDTH + WIDTH) / 1e6
SCRIPT = f"""
import sys, torch, rankwise as rw
from pathlib import Path

def sent_bytes():
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if "eth0:" in line)
    return int(line.partition(":")[2].split()[8])

with rw.join() as world:
    rw.mesh(worker_groups=2, dp_replicate=2)
    torch.manual_seed(world.rank)
    model = rw.replicate(torch.nn.Linear({WIDTH}, {WIDTH}))
    outer = rw.local_sgd(model, every={EVERY}, outer="diloco")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(world.rank)
    rw.barrier()
    before = sent_bytes()
    for step in range({NUM_STEPS}):
        optimizer.zero_grad()
        (model(torch.randn(4, {WIDTH}, generator=generator)) - 1).square().mean().backward()
        optimizer.step()
    apart = len({{one.sum().item() for one in rw.all_gather(model.bias)}})
    outer.synchronize()
    rw.barrier()
    sent = sent_bytes() - before
    same = all(torch.equal(one, model.weight) for one in rw.all_gather(model.weight.detach()))
    print(f"{{apart}} apart, same bits: {{same}}, rounds: {{outer.state_dict()['num_rounds']}}, sent: {{sent / 1e6}}")
"""


def test_the_link_between_worker_groups_carries_each_change_once_per_round(hosts: Hosts) -> None:
    for ended in hosts.run_ranks(SCRIPT, [2, 2]):
        assert ended.exit_code == 0, ended.stderr
        found = re.fullmatch(r"2 apart, same bits: True, rounds: 3, sent: (.*)\n", ended.stdout)
        assert found, ended.stdout
        # Of two worker groups each sends what it changed once, however many ranks have a copy; and small talk.
        rounds = NUM_STEPS // EVERY
        assert rounds * MEGABYTES < float(found[1]) < rounds * MEGABYTES * 1.1 + 0.5
