# SPDX-License-Identifier: Apache-2.0
"""The address and the port that rank 0 serves the job's store on.

The port is the one of the reading, chosen by a launcher, the user or Slurm's job number; where there is none,
the kernel chooses one and :mod:`rankwise.store.published` writes it into a file.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from rankwise.errors import ConfigurationError
from rankwise.world import network

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.world.environments import Reading

EVERY_INTERFACE = "0.0.0.0"  # noqa: S104 - where others come from is not known
EXPLICIT = "explicit"
"""The source of a reading in which every rank was given the same address."""


def listening_address(reading: Reading, *, in_kubernetes: bool) -> tuple[str, str | None]:
    """Return the address rank 0 serves the store on, and a log line if it is not the expected one.

    Listens only on the address the others were given, if this machine has it. If not (the name means loopback on
    this machine, as in Debian's ``/etc/hosts`` and with Kubernetes operators; it belongs to a Kubernetes service),
    listens on every interface.

    Args:
        reading: what started this process; it holds the address.
        in_kubernetes: whether this process runs in a pod, where an address may be a service's.

    Raises:
        ConfigurationError: the address belongs to another machine.
    """
    if reading.address is None:
        raise ConfigurationError("No address is given to serve the store on.", evidence=reading.reason)
    host, port = reading.address
    try:
        addresses = network.resolve(host)
    except ConfigurationError:
        if not in_kubernetes:
            raise
        addresses = []  # a service's name, which resolves everywhere once this pod is ready
    own = [address for address in addresses if network.is_own(address)]
    if not own:
        if in_kubernetes:
            return EVERY_INTERFACE, _open_note(port, f"{host} is not an address of this pod, but probably of a service")
        raise _not_here(host, addresses)
    if reading.is_one_machine:
        return own[0], None
    if len(own) == 1 and not network.is_loopback(own[0]):
        return own[0], None
    elsewhere = in_kubernetes or (reading.num_nodes or 1) > 1 or reading.local_world_size is not None
    # localhost is taken literally, unless ranks are known to be elsewhere and were given another address.
    if host in {"localhost", own[0]} and (reading.source == EXPLICIT or not elsewhere):
        return own[0], None
    return EVERY_INTERFACE, _open_note(port, f"{host} resolves to {', '.join(own)} on this machine, but not on others")


def _open_note(port: int, why: str) -> str:
    return f"the job's store listens on every interface, port {port}: {why}"


def _not_here(host: str, addresses: Sequence[str]) -> ConfigurationError:
    own = network.own_addresses()
    return ConfigurationError(
        f"Rank 0 must serve the job's store at {host}, which is not an address of its machine.",
        where=socket.gethostname(),
        evidence="\n".join([f"{host} is {', '.join(addresses)}", *network.interface_lines()]),
        do=f"give every rank rank 0's address: MASTER_ADDR={own[0] if own else '<its address>'} (or init_method), "
        f"or start rank 0 on {host}",
    )
