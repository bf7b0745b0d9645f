# SPDX-License-Identifier: Apache-2.0
"""Where rank 0 listens and which interface ranks use, on values. With real hosts: tests/multihost/test_networks.py."""

from __future__ import annotations

import os
from typing import Any

import pytest

from rankwise.comm.world_group import common_interface
from rankwise.errors import ConfigurationError, PeerMissing
from rankwise.store.bootstrap import (
    EVERY_INTERFACE,
    RankAddress,
    listening_address,
    neighbours_by_host,
    open_store,
    wait_for_store,
)
from rankwise.world import network
from rankwise.world.environments.reading import Reading
from rankwise.world.environments.table import read
from rankwise.world.network import Interface, Route

NAMES = {
    "gpu-00": ["10.0.0.1"],
    "debian": ["127.0.1.1"],
    "both": ["127.0.1.1", "10.0.0.1"],
    "gpu-07": ["10.0.0.7"],
    "localhost": ["127.0.0.1"],
    "10.0.0.1": ["10.0.0.1"],
    "127.0.0.1": ["127.0.0.1"],
    "10.0.0.7": ["10.0.0.7"],
}


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine at 10.0.0.1, in a network where names are as above."""
    eth0 = Interface(name="eth0", addresses=("10.0.0.1",), is_up=True, is_loopback=False)
    lo = Interface(name="lo", addresses=("127.0.0.1",), is_up=True, is_loopback=True)

    def resolve(host: str) -> list[str]:
        if host not in NAMES:
            raise ConfigurationError(f"This machine cannot resolve the host name {host!r}.")
        return NAMES[host]

    def route_to(host: str, port: int = 0) -> Route:
        remote = resolve(host)[0]
        if network.is_loopback(remote):
            return Route(interface="lo", local_address="127.0.0.1", remote_address=remote)
        return Route(interface="eth0", local_address="10.0.0.1", remote_address=remote)

    monkeypatch.setattr(network, "interfaces", lambda: [lo, eth0])
    monkeypatch.setattr(network, "resolve", resolve)
    monkeypatch.setattr(network, "route_to", route_to)


def reading(host: str, **more: Any) -> Reading:
    return Reading(**{"rank": 0, "world_size": 4, "address": (host, 29500), "source": "env", **more})


ONE_MACHINE = {"local_world_size": 4}
SEVERAL = {"local_world_size": 2}


@pytest.mark.parametrize(
    ("host", "facts", "in_kubernetes", "expected"),
    [
        ("gpu-00", {}, False, "10.0.0.1"),
        ("10.0.0.1", SEVERAL, False, "10.0.0.1"),
        ("gpu-00", ONE_MACHINE, False, "10.0.0.1"),
        ("localhost", ONE_MACHINE, False, "127.0.0.1"),
        ("debian", ONE_MACHINE, False, "127.0.1.1"),
        # Who says localhost and nothing of other machines means this one.
        ("localhost", {}, False, "127.0.0.1"),
        ("127.0.0.1", {}, False, "127.0.0.1"),
        ("127.0.0.1", {"source": "explicit"}, True, "127.0.0.1"),
        ("localhost", SEVERAL, False, EVERY_INTERFACE),
        ("localhost", {"num_nodes": 2}, False, EVERY_INTERFACE),
        ("localhost", {}, True, EVERY_INTERFACE),
        # A name is what all were told.
        ("debian", {}, False, EVERY_INTERFACE),
        ("both", {}, False, EVERY_INTERFACE),
        ("gpu-07", {}, True, EVERY_INTERFACE),
        ("not-yet-known", {}, True, EVERY_INTERFACE),
    ],
)
def test_rank_zero_opens_only_what_the_others_need(
    host: str, facts: dict[str, Any], in_kubernetes: bool, expected: str
) -> None:
    address, words = listening_address(reading(host, **facts), in_kubernetes=in_kubernetes)
    assert address == expected
    assert (words is not None) == (expected == EVERY_INTERFACE)


@pytest.mark.parametrize("facts", [{}, ONE_MACHINE, SEVERAL])
def test_another_machines_address_is_refused(facts: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match="serve the job's store at gpu-07") as error:
        listening_address(reading("gpu-07", **facts), in_kubernetes=False)
    assert str(error.value.evidence).splitlines()[0] == "gpu-07 is 10.0.0.7"
    assert "MASTER_ADDR=10.0.0.1" in str(error.value.do)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="cannot resolve the host name 'nowhere'"):
        listening_address(reading("nowhere"), in_kubernetes=False)


HERE, THERE = RankAddress(hostname="gpu-00", address="10.0.0.1"), RankAddress(hostname="gpu-07", address="10.0.0.7")


@pytest.mark.parametrize(
    ("places", "store_host", "expected"),
    [
        ([HERE, HERE], "gpu-00", ("lo", True)),
        ([HERE, HERE], None, ("lo", True)),
        ([HERE, THERE], "gpu-00", ("eth0", False)),
        ([HERE, THERE], "gpu-07", ("eth0", False)),
        # The store is reached through loopback, or is a file: another rank's address tells.
        ([HERE, THERE], "debian", ("eth0", False)),
        ([HERE, THERE], None, ("eth0", False)),
        # Two machines of one name are two machines.
        ([HERE, RankAddress(hostname="gpu-00", address="10.0.0.9")], "gpu-00", ("eth0", False)),
        ([RankAddress(hostname="a", address=None), RankAddress(hostname="b", address=None)], None, None),
    ],
)
def test_ranks_use_the_interface_between_them(
    places: list[RankAddress], store_host: str | None, expected: tuple[str, bool] | None
) -> None:
    assert common_interface(neighbours_by_host(places)[places[0].hostname], 0, store_host) == expected


def test_waiting_for_a_store_ends_with_the_last_refusal() -> None:
    with pytest.raises(PeerMissing, match=r"store at 127\.0\.0\.1, port 1, could not be reached within 0 s") as error:
        wait_for_store(reading("127.0.0.1", rank=2, address=("127.0.0.1", 1)), timeout_seconds=0.0)
    assert error.value.ranks == (0,)
    assert "Connection refused" in str(error.value.evidence)


def test_ranks_of_one_machine_without_rank_0_are_told_the_variables_and_the_line_to_write() -> None:
    flux = {"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2", "FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_NNODES": "1"}
    alone = read({**flux, "FLUX_JOB_ID": f"of-test-{os.getpid()}", "FLUX_URI": "local:///nowhere"})
    with pytest.raises(PeerMissing, match="Rank 0 did not join on this machine within 0 s") as error:
        open_store(alone, 0.0)
    assert error.value.ranks == (0,)
    assert "FLUX_TASK_RANK=1 FLUX_JOB_SIZE=2" in str(error.value.evidence)
    assert "flux run --env=MASTER_ADDR=<machine of rank 0>" in str(error.value.do)
