# SPDX-License-Identifier: Apache-2.0
"""Facts about this machine's network. Between several machines: tests/multihost/test_networks.py."""

from __future__ import annotations

import socket

import pytest

from rankwise.errors import ConfigurationError
from rankwise.world import network
from rankwise.world.network import Interface, Route

DEBIAN = """\
127.0.0.1\tlocalhost
127.0.1.1\tgpu-01.lab gpu-01  # written by the installer
10.0.0.7 gpu-07
::1 gpu-01
"""


def test_the_loopback_interface_is_known_by_its_name_and_addresses() -> None:
    (loopback,) = [one for one in network.interfaces() if one.name == "lo"]
    assert loopback.is_loopback
    assert loopback.is_up
    assert loopback.addresses[0] == "127.0.0.1"
    assert [one.name for one in network.interfaces()] == [name for _, name in socket.if_nameindex()]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.1.1", "localhost"])
def test_the_way_to_loopback_is_loopback(host: str) -> None:
    route = network.route_to(host, 29500)
    assert (route.interface, route.local_address) == ("lo", "127.0.0.1")


def test_the_way_to_an_own_address_is_the_interface_that_holds_it() -> None:
    for one in network.interfaces():
        for address in one.addresses:
            if one.is_up and not address.startswith("fe80"):
                assert network.route_to(address) == Route(
                    interface=one.name, local_address=address, remote_address=address
                )


@pytest.mark.parametrize(
    ("address", "own", "loopback"),
    [
        ("127.0.0.1", True, True),
        ("127.0.1.1", True, True),
        ("::1", True, True),
        ("::ffff:127.0.0.1", True, True),
        ("203.0.113.77", False, False),
        ("fe80::1%lo", False, False),
    ],
)
def test_own_and_loopback_addresses_are_distinguished_from_others(address: str, own: bool, loopback: bool) -> None:
    assert (network.is_own(address), network.is_loopback(address)) == (own, loopback)


def test_own_addresses_are_own_and_reachable_by_others() -> None:
    for address in network.own_addresses():
        assert network.is_own(address)
        assert not network.is_loopback(address)
        assert network.resolve(address) == [address]


def test_an_unknown_host_is_named_with_what_to_ask() -> None:
    with pytest.raises(ConfigurationError, match=r"cannot resolve the host name 'nowhere\.invalid'") as error:
        network.resolve("nowhere.invalid")
    assert str(error.value.do).startswith("getent hosts nowhere.invalid\n")


@pytest.mark.parametrize("host", ["a" * 64 + ".b", "\x00", "a..b"])
def test_an_invalid_name_is_an_unknown_host(host: str) -> None:
    with pytest.raises(ConfigurationError, match="cannot resolve the host name"):
        network.resolve(host)


def test_a_name_that_means_loopback_is_no_address_for_others() -> None:
    with pytest.raises(ConfigurationError, match="localhost resolves to this machine itself") as error:
        raise network.loopback_name("localhost", network.resolve("localhost"))
    assert "localhost is 127.0.0.1" in str(error.value.evidence)


def test_the_line_of_the_hosts_file_that_says_so_is_found() -> None:
    assert network.hosts_file_lines("gpu-01", DEBIAN) == ["127.0.1.1 gpu-01.lab gpu-01", "::1 gpu-01"]
    assert network.hosts_file_lines("gpu-07", DEBIAN) == []


def test_interfaces_are_reported_in_one_line_each(monkeypatch: pytest.MonkeyPatch) -> None:
    known = [
        Interface(name="eth0", addresses=("10.0.0.1", "fd00::1"), is_up=True, is_loopback=False),
        Interface(name="ib0", addresses=(), is_up=False, is_loopback=False),
    ]
    monkeypatch.setattr(network, "interfaces", lambda: known)
    assert network.interface_lines() == ["eth0: 10.0.0.1, fd00::1", "ib0: no address (down)"]
