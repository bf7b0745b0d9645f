# SPDX-License-Identifier: Apache-2.0
"""The hosts of a job as the user writes them: ``a,b``, ``user@a``, ``a:4``, ``[::1]:4``, and with Horovod's slots.

Resolves no names. Imported by the command line, by ``ssh`` and by ``horovod.run()``.
"""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from pathlib import Path

from rankwise.errors import ConfigurationError

HOSTS_EXAMPLE = "for example --hosts gpu-01,gpu-02 or --hosts me@gpu-01:4,[fd00::2]:2"
Slots = list[tuple[str, int]]
"""Each host, and how many ranks it can run."""
LOCAL = ("localhost", "127.0.0.1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """One host to start ranks on."""

    name: str
    """A name from ssh's configuration or the network, or an address."""
    user: str | None = None
    num_ranks: int | None = None
    """Number of ranks there; ``None`` if not given for the host."""

    @property
    def destination(self) -> str:
        """Its name for ssh."""
        return self.name if self.user is None else f"{self.user}@{self.name}"


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Return the hosts in the order they were named; the first serves the job.

    Raises:
        ConfigurationError: a host is given twice, or a word is not a host.
    """
    hosts = tuple(_parse_host(word.strip(), text) for word in text.split(","))
    seen: dict[str, Host] = {}
    for host in hosts:
        other = seen.setdefault(host.name.lower(), host)
        if other is not host:
            raise ConfigurationError(
                f"The host {host.name} is given twice in --hosts {text}.",
                do=f"give it once, with the number of its ranks: {host.name}:{_together(other, host)}",
            )
    return hosts


def _parse_host(word: str, text: str) -> Host:
    user, at, place = word.rpartition("@")
    name, number = _name_and_number(place)
    # A word that starts with a dash would be an option of ssh.
    if not name or name.startswith("-") or user.startswith("-") or (at and not user) or " " in word:
        raise ConfigurationError(f"{word!r} in --hosts {text} is not a host.", do=HOSTS_EXAMPLE)
    if number is not None and not (number.isascii() and number.isdecimal() and int(number) > 0):
        raise ConfigurationError(f"The number of ranks must be >= 1, got {word!r} in --hosts {text}.", do=HOSTS_EXAMPLE)
    return Host(name=name, user=user or None, num_ranks=None if number is None else int(number))


def _name_and_number(place: str) -> tuple[str, str | None]:
    """Return the two sides of the last colon; the colons of a bare IPv6 address do not count."""
    if place.startswith("["):
        name, bracket, rest = place[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            return "", None
        return name, rest[1:] if rest else None
    if place.count(":") > 1:
        return place, None
    name, colon, number = place.partition(":")
    return name, number if colon else None


def _together(first: Host, second: Host) -> int | str:
    if first.num_ranks is None or second.num_ranks is None:
        return "RANKS"
    return first.num_ranks + second.num_ranks


# -- as Horovod writes them: worker-0:2,worker-1:2, or a file with one line per host ------------------------


def parse_slots(text: str, what: str) -> Slots:
    """Return the hosts of ``worker-0:2,worker-1:2``; errors quote ``what``, which the user wrote before them.

    Raises:
        ConfigurationError: a word is not a host and its slots.
    """
    found: Slots = []
    for word in text.split(","):
        matched = re.fullmatch(r"([\w.-]+):([0-9]+)", word.strip())
        if matched is None:
            raise ConfigurationError(
                f"{word!r} in {what}{text} is not a host with slots.",
                do=f"write {what}worker-0:2,worker-1:2",
            )
        found.append((matched[1], int(matched[2])))
    return found


def read_slots(path: str) -> Slots:
    """Return the hosts of a file with lines like ``worker-0 slots=2``.

    Raises:
        ConfigurationError: the file cannot be read, is empty, or has a line of another form.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigurationError(f"The host file {path!r} cannot be read: {error.strerror}.") from error
    found: Slots = []
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        matched = re.fullmatch(r"([\w.-]+)\s+slots\s*=\s*([0-9]+)", text)
        if text and matched is None:
            raise ConfigurationError(
                f"Line {number} of {path} is not a host with slots.", evidence=line, do="write: worker-0 slots=2"
            )
        if matched is not None:
            found.append((matched[1], int(matched[2])))
    if not found:
        raise ConfigurationError(
            f"The host file {path!r} has no hosts.", do="write one line per host: worker-0 slots=2"
        )
    return found


def filled(slots: Slots, num_ranks: int) -> Slots:
    """Return the hosts that get ranks, filled one after another."""
    used: Slots = []
    left = num_ranks
    for host, number in slots:
        if left and number:
            used.append((host, min(number, left)))
            left -= used[-1][1]
    return used


def are_here(used: Slots) -> bool:
    """Return whether all hosts are this machine."""
    return all(host in (*LOCAL, socket.gethostname()) for host, _ in used)
