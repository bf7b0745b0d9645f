# SPDX-License-Identifier: Apache-2.0
"""Records of several hosts are put on one clock: the second host's runs in a time namespace, ahead by a known time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rankwise.insight.run_records import read_run
from rankwise.insight.step_table import table_of
from rankwise.insight.trace_events import clock_ahead

if TYPE_CHECKING:
    from pathlib import Path

    from hosts import Hosts

AHEAD_SECONDS = 4321
CODE = f"""
import ctypes, os, subprocess, sys
if int(os.environ["RANK"]) >= 1 and "MOVED" not in os.environ:
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(0x80) == 0, os.strerror(ctypes.get_errno())  # CLONE_NEWTIME: of its children
    with open("/proc/self/timens_offsets", "w") as file:
        file.write("monotonic {AHEAD_SECONDS} 0")
    env = {{**os.environ, "MOVED": "1"}}
    sys.exit(subprocess.run([sys.executable, "-c", sys.argv[0] if False else CODE], env=env).returncode)
"""
TRAIN = """
import time, torch, rankwise as rw
with rw.join(report={folder!r}) as world:
    model = rw.replicate(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(20):
        if world.rank == 1:
            time.sleep(0.02)
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
"""


def test_steps_of_two_hosts_are_on_one_clock(hosts: Hosts, tmp_path: Path) -> None:
    folder = tmp_path / "records"
    train = TRAIN.format(folder=str(folder))
    ended = hosts.run_ranks(f"CODE = {train!r}\n{CODE}\nexec(CODE)", [1, 1])
    assert [one.exit_code for one in ended] == [0, 0], ended[0].stderr + ended[1].stderr
    run = read_run(folder)
    first, second = run.ranks
    assert second.facts["monotonic"] - first.facts["monotonic"] > AHEAD_SECONDS - 60, "the namespace has its own clock"
    assert clock_ahead(first) == 0.0
    # The machine under both hosts is one: how far they differ is known exactly.
    assert clock_ahead(second) == pytest.approx(AHEAD_SECONDS, abs=0.001)
    table = table_of(run.ranks)
    # Ranks leave an exchange together, and begin their steps soon after it; the second one is waited for, but where a
    # busy machine held up the first one.
    assert abs(table.start[0] - table.start[1]).max() < 1.0
    assert (table.last[1:] == 1).mean() > 0.5
