# SPDX-License-Identifier: Apache-2.0
"""Where the machines of a job meet, on which port, and whether this one serves the others.

A port is bound at once and kept, never picked first and bound later.
Imported by the launcher's start.
"""

from __future__ import annotations

import errno
import socket
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rankwise.errors import ConfigurationError
from rankwise.launch.auth import draw_secret, secret_shared_by_machines
from rankwise.store import wire
from rankwise.world import network
from rankwise.world.environments.process import in_kubernetes

if TYPE_CHECKING:
    from rankwise.launch.options import LaunchOptions

LOOPBACK = "127.0.0.1"
ANY_PORT = 0
"""Makes the system choose a free port."""
EVERY_INTERFACE = "0.0.0.0"  # noqa: S104 - only where a scheduler names this machine by an address it does not have


@dataclass(frozen=True, kw_only=True, slots=True)
class JobAddress:
    """A job's address as this machine uses it."""

    address: tuple[str, int]
    secret: str = field(repr=False)
    listener: socket.socket | None = None
    """Where this machine serves the job; ``None`` if another one does."""
    interface: str | None = None
    """Network interface that leads to the other machines; ``None`` for a job on one machine."""
    notice: str = ""
    """A line for the user; empty if everything is as expected."""


def find(options: LaunchOptions) -> JobAddress:
    """Return where to meet; serves nothing yet, but binds the port if this machine will.

    Raises:
        ConfigurationError: the host is unknown, resolves to loopback but is not this machine's own name, or is not
            this machine although this is node 0; the port is in use.
    """
    if options.rendezvous is None:
        listener = wire.listen(LOOPBACK, ANY_PORT)
        interface = None if options.interface is None else known_interface(options.interface)
        return JobAddress(
            address=listener.getsockname()[:2], secret=draw_secret(), listener=listener, interface=interface
        )
    host, number = options.rendezvous
    if options.served_elsewhere:
        interface = interface_to(host) if options.interface is None else known_interface(options.interface)
        return JobAddress(address=options.rendezvous, secret=secret_shared_by_machines(), interface=interface)
    seen = _seen_from_here(host, options)
    listener = None
    if seen.listens_on is not None and options.node_rank in {None, 0}:
        listener = _listen(seen.listens_on, number, options.node_rank)
    way = seen.way or seen.address
    interface = interface_to(way) if options.interface is None else known_interface(options.interface)
    if listener is not None:
        number = listener.getsockname()[1]
    return JobAddress(
        address=(seen.address, number),
        secret=secret_shared_by_machines(),
        listener=listener,
        interface=interface,
        notice=seen.notice if listener is not None else "",
    )


def listen_towards(other: str, options: LaunchOptions) -> JobAddress:
    """Return where this machine serves a job: on a port chosen by the system, in the network of another machine.

    Args:
        other: an address of the other machine; not used if ``options`` give an interface.
        options: of node 0.

    Raises:
        ConfigurationError: there is no such interface, no route, or this machine cannot listen there.
    """
    if options.interface is None:
        return find(replace(options, rendezvous=(network.route_to(other).local_address, ANY_PORT)))
    held = _addresses_on(options.interface)
    if not held:
        raise ConfigurationError(
            f"Interface {options.interface} does not exist or has no address.",
            where=socket.gethostname(),
            evidence="\n".join(network.interface_lines()),
            do="pass --interface with one of these, or omit it",
        )
    return find(replace(options, rendezvous=(held[0], ANY_PORT)))


@dataclass(frozen=True, kw_only=True, slots=True)
class _SeenFromHere:
    """The rendezvous as this machine sees it."""

    address: str
    """The address to connect to, or the name of a pod, which is looked up for each connection."""
    listens_on: str | None
    """The address to listen on, if this machine may be the host."""
    way: str = ""
    """Where ``address`` is a name: an address on the same network."""
    notice: str = ""


def _seen_from_here(host: str, options: LaunchOptions) -> _SeenFromHere:
    try:
        found = network.resolve(host)
    except ConfigurationError:
        if not in_kubernetes():
            raise
        found = []  # the name of a pod is known once that has started
    outside = [address for address in found if not network.is_loopback(address)]
    if found and not outside:
        # Debian maps the machine's own name to 127.0.1.1 in /etc/hosts; Kubernetes operators tell the first
        # pod that rank 0 is localhost.
        is_itself = options.node_rank == 0 or (options.node_rank is None and host == socket.gethostname())
        if is_itself and (options.told_by_scheduler or host not in {*found, "localhost"}):
            return _every_interface(host, options)
        if host in {*found, "localhost"}:
            return _SeenFromHere(address=found[0], listens_on=found[0])
        raise network.loopback_name(host, found)
    if outside and network.is_own(outside[0]):
        return _SeenFromHere(address=outside[0], listens_on=outside[0])
    if in_kubernetes():
        # The name of a service in front of this pod, or of a pod that has just started, and of its predecessor.
        if options.node_rank == 0 or (options.node_rank is None and host.partition(".")[0] == socket.gethostname()):
            return _every_interface(host, options)
        way = outside[0] if outside else network.main_address() or LOOPBACK
        return _SeenFromHere(address=host, listens_on=None, way=way)
    address = outside[0]
    if options.node_rank != 0:
        return _SeenFromHere(address=address, listens_on=None)
    raise ConfigurationError(
        f"This is node 0, but the rendezvous {host} is another machine.",
        where=socket.gethostname(),
        evidence=f"{host} is {address}; this machine has {', '.join(network.own_addresses()) or 'no address'}",
        do="make the machine in --rendezvous node 0, or pass an address of this one",
    )


def _every_interface(host: str, options: LaunchOptions) -> _SeenFromHere:
    address = network.main_address() or LOOPBACK
    if options.interface is not None:
        address = next(iter(_addresses_on(options.interface)), address)
    notice = f"[rankwise] {host} is not known here as an address of this machine; listening on every interface\n"
    return _SeenFromHere(address=address, listens_on=EVERY_INTERFACE, notice=notice)


def _addresses_on(interface: str) -> list[str]:
    return [address for one in network.interfaces() if one.name == interface for address in one.addresses]


def _listen(address: str, port: int, node_rank: int | None) -> socket.socket | None:
    """Listen on a port of this machine; return ``None`` if another launcher here already does so for the job."""
    try:
        return wire.listen(address, port)
    except ConfigurationError as error:
        if port == ANY_PORT:
            raise error.supplement(do="pass another network: --interface NAME") from error.__cause__
        if not isinstance(error.__cause__, OSError) or error.__cause__.errno != errno.EADDRINUSE:
            raise
        # A second launcher on the machine of the first: the one that listens serves the job.
        if node_rank is None:
            return None
        raise ConfigurationError(
            f"Port {port} of {address} is in use, but node 0 must serve the job there.",
            do="pass another --rendezvous port on every machine or, if another launcher is node 0, another "
            f"--node-rank. To see what listens there: ss -ltnp 'sport = :{port}'",
        ) from error


def known_interface(name: str) -> str:
    """Return the name of an interface.

    Raises:
        ConfigurationError: this machine has no interface of that name.
    """
    known = [interface.name for interface in network.interfaces()]
    if name not in known:
        raise ConfigurationError(
            f"This machine has no network interface {name!r}.",
            where=socket.gethostname(),
            evidence="\n".join(network.interface_lines()),
            do=f"use one of {', '.join(known)}, or omit --interface",
        )
    return name


def interface_to(address: str) -> str:
    """Return the interface that has an address, or that leads to it."""
    for interface in network.interfaces():
        if address in interface.addresses:
            return interface.name
    return network.route_to(address).interface
