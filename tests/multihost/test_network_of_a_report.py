# SPDX-License-Identifier: Apache-2.0
"""The report names the link between hosts that is slow: one host may send 20 Mbit/s only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rankwise.insight.network import links_of, slow_network
from rankwise.insight.page import page_of
from rankwise.insight.run_records import read_run

if TYPE_CHECKING:
    from pathlib import Path

    from hosts import Hosts

MBIT = 20.0
NUM_BYTES = 4 * (4 * 128 * 129)
TRAIN = """
import os, signal, torch, rankwise as rw
with rw.join(report={folder!r}) as world:
    model = rw.replicate(torch.nn.Sequential(*[torch.nn.Linear(128, 128) for _ in range(4)]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(20):
        model(torch.ones(1, 128)).sum().backward()
        optimizer.step()
    if {is_killed}:
        rw.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("is_killed", [False, True])
@pytest.mark.parametrize(("slow", "ranks_per_host"), [(1, [1, 1]), (0, [2, 1])])
def test_the_first_sentence_names_the_slow_link(
    hosts: Hosts, tmp_path: Path, slow: int, ranks_per_host: list[int], *, is_killed: bool
) -> None:
    hosts.limit(slow, MBIT)
    folder = tmp_path / "records"
    ended = hosts.run_ranks(TRAIN.format(folder=str(folder), is_killed=is_killed), ranks_per_host)
    assert {one.exit_code for one in ended} == {-9 if is_killed else 0}, ended[0].stderr
    run = read_run(folder)
    source, destination = f"host{slow}", f"host{1 - slow}"
    links = {(link.source, link.destination): link for link in links_of(run.ranks)}
    assert links.keys() == {(source, destination), (destination, source)}
    # A host sends no faster than it may; the burst at the start of each step counts too.
    assert links[source, destination].bytes_per_second < 2 * MBIT * 1e6 / 8
    found = slow_network(list(links.values()))
    assert found is not None
    assert (found.extent, found.hosts) == ("one way", (source, destination))
    page = page_of(run, "en")
    assert f"; the network from {source} to {destination} sends " in page.headline
    assert f"{source} → {destination}" in page.html
    assert f"从 {source} 到 {destination} 的网络" in page_of(run, "zh").headline
    if not is_killed:
        assert links[source, destination].sent_bytes > 10 * NUM_BYTES


def test_ranks_of_one_host_have_no_network(hosts: Hosts, tmp_path: Path) -> None:
    folder = tmp_path / "records"
    ended = hosts.run_ranks(TRAIN.format(folder=str(folder), is_killed=False), [2, 0])
    assert [one.exit_code for one in ended] == [0, 0], ended[0].stderr
    run = read_run(folder)
    assert links_of(run.ranks) == []
    assert 'id="network"' not in page_of(run, "en").html
