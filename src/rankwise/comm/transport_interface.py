# SPDX-License-Identifier: Apache-2.0
"""The network interface that torch's transports use, from join to leave."""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING

from rankwise.errors import ConfigurationError, rank_prefix
from rankwise.store.bootstrap import route_beyond_loopback
from rankwise.world import network
from rankwise.world.environments.process import gloo_interfaces, set_interface, unset

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.store.bootstrap import RankAddress
    from rankwise.world.environments.reading import Reading

_variables: list[str] = []
"""The variables set here, which are removed when the world is left."""


def choose(reading: Reading, addresses: list[RankAddress]) -> None:
    """Set the interface of Gloo and NCCL to the one that connects the ranks, unless the user named one."""
    forget()  # from a join that failed
    wrong = set(gloo_interfaces()) - {one.name for one in network.interfaces()}
    if wrong:
        raise ConfigurationError(
            f"GLOO_SOCKET_IFNAME names {', '.join(sorted(wrong))}, which is not an interface of this machine.",
            where=rank_prefix(reading.rank, reading.world_size, socket.gethostname()),
            evidence="\n".join(network.interface_lines()),
            do="unset GLOO_SOCKET_IFNAME: rankwise picks the interface that reaches the other ranks",
        )
    found = common_interface(addresses, reading.rank, None if reading.address is None else reading.address[0])
    if found is not None:
        name, is_loopback = found
        _variables.extend(set_interface(name, is_loopback=is_loopback))


def forget() -> None:
    """Remove what was set."""
    unset(_variables)
    _variables.clear()


def common_interface(addresses: Sequence[RankAddress], rank: int, store_host: str | None) -> tuple[str, bool] | None:
    """Return the interface that ranks reach each other through, and whether it is loopback.

    On one machine that is loopback; on several it is the one that reaches the store or, if that does not decide (the
    store is on this machine, under a name that resolves to loopback), the one that reaches a rank elsewhere.
    ``store_host`` is ``None`` where the store is a file.

    Returns:
        ``None`` if no interface is found; torch then uses the machine's own hostname, which is not used otherwise.
    """
    own = addresses[rank]
    if all(place == own for place in addresses):
        return next(((one.name, True) for one in network.interfaces() if one.is_loopback and one.is_up), None)
    route = route_beyond_loopback(store_host)
    others = [place.address for place in addresses if place.hostname != own.hostname and place.address is not None]
    for address in others if route is None else []:
        with contextlib.suppress(ConfigurationError):
            return network.route_to(address).interface, False
    return None if route is None else (route.interface, False)
