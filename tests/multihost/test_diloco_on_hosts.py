# SPDX-License-Identifier: Apache-2.0
"""The example of worker groups that exchange updates rarely, each worker group a host, over a link of 100 Mbit/s."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hosts import Hosts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.warm import WarmPython

EXAMPLE = Path(__file__).parents[2] / "examples" / "diloco.py"
STEPS = 30


@pytest.fixture
def slow_hosts(warm_python: WarmPython) -> Iterator[Hosts]:
    """Two hosts with a slow link."""
    with Hosts(2, mbit=100, python=warm_python) as made:
        yield made


def sent_bytes(hosts: Hosts) -> list[int]:
    """Return how much each host has sent over the link."""
    found = []
    for namespace in hosts.namespaces:
        read = ["ip", "netns", "exec", namespace, "cat", "/proc/net/dev"]
        table = subprocess.run(read, check=True, capture_output=True, text=True).stdout
        (line,) = (line for line in table.splitlines() if line.strip().startswith("eth0:"))
        found.append(int(line.partition(":")[2].split()[8]))
    return found


@pytest.mark.timeout(120)
def test_worker_groups_on_slow_hosts_learn_the_same_and_send_a_part_of_what_gradients_would(slow_hosts: Hosts) -> None:
    before = sent_bytes(slow_hosts)
    ended = slow_hosts.run_ranks(
        EXAMPLE, 1, "--every", "10", "--steps", str(STEPS), "--compress", "bf16", timeout_seconds=100
    )
    after = sent_bytes(slow_hosts)
    for rank in ended:
        assert rank.exit_code == 0, rank.stderr
    losses = [float(loss) for loss in re.findall(r"step +\d+ +loss (\S+)", ended[0].stdout)]
    assert len(losses) == STEPS // 10
    assert losses[0] > losses[1] > losses[2]
    final = [re.findall(r"held out: loss (\S+)", rank.stdout) for rank in ended]
    assert len(final[0]) == 1
    assert final[0] == final[1], "the parameters are the same bits on both worker groups"
    (kilobytes,) = re.findall(r"to exchange: (\d+) kB", ended[0].stdout)
    # Of two that add up, each sends at least as many bytes as there are, in every step. Here: the model once, and a
    # half of it four times.
    gradients_bytes = int(kilobytes) * 1000 * STEPS
    for start, end in zip(before, after, strict=True):
        assert end - start < gradients_bytes / 8
