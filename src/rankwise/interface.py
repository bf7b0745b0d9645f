# SPDX-License-Identifier: Apache-2.0
"""The network interface that torch's transports use, from join to leave. Used by process_group."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from rankwise import network, rendezvous
from rankwise.environments.process import gloo_interfaces, set_interface, unset
from rankwise.errors import ConfigurationError, rank_prefix

if TYPE_CHECKING:
    from rankwise.environments import Reading
    from rankwise.rendezvous import Place

_variables: list[str] = []
"""Those set here, which are removed with the world."""


def choose(reading: Reading, places: list[Place]) -> None:
    """Have Gloo and NCCL use the interface that the ranks reach each other through, unless the user named one."""
    forget()  # of a join that failed
    wrong = set(gloo_interfaces()) - {one.name for one in network.interfaces()}
    if wrong:
        raise ConfigurationError(
            f"GLOO_SOCKET_IFNAME names {', '.join(sorted(wrong))}, which is no interface of this machine.",
            where=rank_prefix(reading.rank, reading.world_size, socket.gethostname()),
            evidence="\n".join(network.told_interfaces()),
            do="unset GLOO_SOCKET_IFNAME: rankwise takes the interface that leads to the other ranks",
        )
    found = rendezvous.common_interface(places, reading.rank, None if reading.address is None else reading.address[0])
    if found is not None:
        name, is_loopback = found
        _variables.extend(set_interface(name, is_loopback=is_loopback))


def forget() -> None:
    """Remove what was set."""
    unset(_variables)
    _variables.clear()
