# SPDX-License-Identifier: Apache-2.0
"""The hosts of a job as the user writes them: ``a,b``, ``user@a``, ``a:4``, ``[::1]:4``.

Values only: resolves no names. Imported by the command line and by ``ssh``.
"""

from __future__ import annotations

from dataclasses import dataclass

from rankwise.errors import ConfigurationError

EXAMPLE = "for example --hosts gpu-01,gpu-02 or --hosts me@gpu-01:4,[fd00::2]:2"


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
        raise ConfigurationError(f"{word!r} in --hosts {text} is not a host.", do=EXAMPLE)
    if number is not None and not (number.isascii() and number.isdecimal() and int(number) > 0):
        raise ConfigurationError(f"The number of ranks must be >= 1, got {word!r} in --hosts {text}.", do=EXAMPLE)
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
