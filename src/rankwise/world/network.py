# SPDX-License-Identifier: Apache-2.0
"""Facts about this machine's network, as values: its interfaces, what a name resolves to here, the route to a host.

Sends nothing, opens no connection, reads no environment variable and imports no torch.
Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import re
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

HOSTS_FILE = Path("/etc/hosts")
LIST_OF_MACHINES = re.compile(r"[^/:\[\]]\[[\d,-]+\]")
"""How Slurm writes several machines: ``gpu[01-03,7]``."""
IFF_UP = 0x1
IFF_LOOPBACK = 0x8
IFF_RUNNING = 0x40
SOMEWHERE = "203.0.113.1"
"""An address that no machine has (RFC 5737): the route to it is the default route."""
ANY_PORT = 9
"""A route does not depend on the port, but a socket needs one."""
CONNECTIONS = ("/proc/net/tcp", "/proc/net/tcp6")
ESTABLISHED = "01"
LOOKS = 3
"""How often the table of connections is read: an entry may be left out while others change."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Interface:
    """One network interface of this machine."""

    name: str
    addresses: tuple[str, ...]
    """IPv4 first, then IPv6, without scope."""
    is_up: bool
    """Whether it is up and has a carrier."""
    is_loopback: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """The route from this machine to an address, as the kernel chooses it."""

    interface: str
    local_address: str
    """The local address, which the other machine sees."""
    remote_address: str


class _InterfaceAddress(ctypes.Structure):
    """``struct ifaddrs``; the fields after these are not read."""

    _fields_: ClassVar = [
        ("next", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("flags", ctypes.c_uint),
        ("address", ctypes.c_void_p),
    ]


def interfaces() -> list[Interface]:
    """Return the interfaces of this machine, by the names that Gloo and NCCL use.

    Source: getifaddrs(3), which Gloo and NCCL also use.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.c_void_p()
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    flags: dict[str, int] = {}
    addresses: dict[str, list[str]] = {}
    try:
        place = first.value
        while place:
            entry = _InterfaceAddress.from_address(place)
            name = entry.name.decode(errors="surrogateescape")
            flags[name] = flags.get(name, 0) | entry.flags
            found = addresses.setdefault(name, [])
            address = _address_at(entry.address)
            if address is not None:
                found.append(address)
            place = entry.next
    finally:
        libc.freeifaddrs(first)
    return [
        Interface(
            name=name,
            addresses=tuple(sorted(found, key=lambda address: ":" in address)),
            is_up=bool(flags[name] & IFF_UP and flags[name] & IFF_RUNNING),
            is_loopback=bool(flags[name] & IFF_LOOPBACK),
        )
        for name, found in addresses.items()
    ]


def _address_at(place: int | None) -> str | None:
    """Return the address in a ``struct sockaddr``, or ``None`` if it is neither IPv4 nor IPv6."""
    if not place:
        return None
    (family,) = struct.unpack("=H", ctypes.string_at(place, 2))
    if family == socket.AF_INET:
        return socket.inet_ntop(family, ctypes.string_at(place + 4, 4))
    if family == socket.AF_INET6:
        return socket.inet_ntop(family, ctypes.string_at(place + 8, 16))
    return None


def own_addresses() -> list[str]:
    """Return the addresses at which other machines may reach this one: IPv4 first, no loopback, no IPv6 link-local."""
    found = [address for one in interfaces() if one.is_up and not one.is_loopback for address in one.addresses]
    return sorted(
        (address for address in found if not (_is_ipv6(address) and _parsed(address).is_link_local)), key=_is_ipv6
    )


def is_own(address: str) -> bool:
    """Return whether an address belongs to this machine, loopback included."""
    wanted = _parsed(address)
    return wanted.is_loopback or any(wanted == _parsed(held) for one in interfaces() for held in one.addresses)


def is_loopback(address: str) -> bool:
    """Return whether an address always refers to the machine it is used on: 127.0.0.0/8 or ::1. A name does not."""
    try:
        return _parsed(address).is_loopback
    except ValueError:
        return False


def canonical(address: str) -> str:
    """Return the one form of an address: without its scope, and an IPv4-mapped IPv6 address as IPv4."""
    return str(_parsed(address))


def user_of_peer(connection: socket.socket) -> int | None:
    """Return the user whose process has the other end of a TCP connection on this machine; ``None`` if none has it.

    Source: proc(5), ``/proc/net/tcp``. A socket that was closed has no owner: its entry names user 0.
    """
    remote, local = (_entry(name[0], name[1]) for name in (connection.getpeername(), connection.getsockname()))
    for path in CONNECTIONS * LOOKS:
        with contextlib.suppress(OSError):
            for line in Path(path).read_text(encoding="ascii").splitlines()[1:]:
                _, at, to, state, _, _, _, user, _, inode, *_ = line.split()
                if (at in remote and to in local) and (state == ESTABLISHED and inode != "0"):
                    return int(user)
    return None


def _entry(address: str, port: int) -> tuple[str, str]:
    """Return how the kernel's tables show an address and port: alone, and as an IPv4 address within IPv6."""
    packed = ipaddress.ip_address(canonical(address)).packed
    words = "".join(f"{word:08X}" for (word,) in struct.iter_unpack("=I", packed))
    mapped = f"{0:016X}{struct.unpack('=I', bytes.fromhex('0000FFFF'))[0]:08X}"
    return f"{words}:{port:04X}", f"{mapped}{words}:{port:04X}"


def main_address() -> str | None:
    """Return the address at which most other machines see this one, or ``None`` on a machine without a network."""
    own = own_addresses()
    try:
        local = route_to(SOMEWHERE).local_address
    except ConfigurationError:  # a network without a default route
        return own[0] if own else None
    return local if local in own else (own[0] if own else None)


def resolve(host: str) -> list[str]:
    """Return the addresses of a host in the order the system prefers, IPv4 before IPv6. An address resolves to itself.

    Raises:
        ConfigurationError: the name cannot be resolved.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        if LIST_OF_MACHINES.search(host):
            raise ConfigurationError(
                f"{host!r} is a list of machines, where the address of one is needed.",
                do=f"give the first one: scontrol show hostnames '{host}' | head -n 1",
            ) from error
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigurationError(
            f"This machine cannot resolve the host name {host!r}.",
            where=socket.gethostname(),
            evidence=f"lookup: {reason}",
            do=f"getent hosts {host}\nuse the host's address in place of its name, or add it to {HOSTS_FILE}",
        ) from error
    addresses = dict.fromkeys(str(place[0]) for *_, place in found)
    return sorted(addresses, key=_is_ipv6)


def route_to(host: str, port: int = ANY_PORT) -> Route:
    """Return the route to a host name or address; the port is only shown in the error.

    Raises:
        ConfigurationError: the name cannot be resolved, or there is no route.

    Source: connect(2) of a datagram socket sends nothing, and has the kernel choose the local address.
    """
    addresses = resolve(host)
    refusals: list[str] = []
    for remote in addresses:
        family = socket.AF_INET6 if _is_ipv6(remote) else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((remote, port))
                local = str(probe.getsockname()[0])
        except OSError as error:
            refusals.append(f"{remote}: {error.strerror}")
            continue
        return Route(interface=_holder(local), local_address=local, remote_address=remote)
    raise ConfigurationError(
        f"This machine has no route to {host}{'' if port == ANY_PORT else f', port {port}'}.",
        where=socket.gethostname(),
        evidence="\n".join([*refusals, *interface_lines()]),
        do=f"ip route get {addresses[0]}\nuse an address of {host} that this machine has a route to",
    )


def loopback_name(host: str, addresses: Sequence[str]) -> ConfigurationError:
    """Return the error for a host that resolves to loopback here, although other machines must reach it."""
    lines = hosts_file_lines(host)
    evidence = [f"{host} is {', '.join(addresses)} here", *(f"{HOSTS_FILE} has: {line}" for line in lines)]
    own = own_addresses()
    return ConfigurationError(
        f"{host} resolves to this machine itself, but other machines must reach it.",
        where=socket.gethostname(),
        evidence="\n".join(evidence),
        do=f"give an address of the intended machine; this one has {', '.join(own) or 'only loopback'}",
    )


def hosts_file_lines(host: str, text: str | None = None) -> list[str]:
    """Return the lines of ``/etc/hosts``, or of ``text``, that give a host a loopback address."""
    if text is None:
        try:
            text = HOSTS_FILE.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return []
    found: list[str] = []
    for line in text.splitlines():
        address, *names = line.partition("#")[0].split() or [""]
        if host in names and (address == "::1" or address.startswith("127.")):
            found.append(" ".join([address, *names]))
    return found


def interface_lines() -> list[str]:
    """Return one line for each interface, for people."""
    return [
        f"{one.name}: {', '.join(one.addresses) or 'no address'}{'' if one.is_up else ' (down)'}"
        for one in interfaces()
    ]


def _holder(address: str) -> str:
    """Return the name of the interface with an address of this machine."""
    wanted = _parsed(address)
    known = interfaces()
    for one in known:
        if any(_parsed(held) == wanted for held in one.addresses):
            return one.name
    for one in known:
        if one.is_loopback and wanted.is_loopback:  # all of 127.0.0.0/8, though it lists 127.0.0.1 only
            return one.name
    raise ConfigurationError(
        f"This machine sends from {address}, but none of its interfaces has that address.",
        where=socket.gethostname(),
        evidence="\n".join(interface_lines()),
        do=f"ip -brief address; ip route get {address}",
    )


def _is_ipv6(address: str) -> bool:
    return ":" in address


def _parsed(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return an address without its scope; an IPv4-mapped IPv6 address as IPv4."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return mapped or parsed
