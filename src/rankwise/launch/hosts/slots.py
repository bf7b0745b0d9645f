# SPDX-License-Identifier: Apache-2.0
"""Hosts with slots, as Horovod writes them: ``worker-0:2,worker-1:2``, or a file with one line per host.

Values only. Imported by the command line and by ``horovod.run()``.
"""

from __future__ import annotations

import re
import socket
from pathlib import Path

from rankwise.errors import ConfigurationError

Slots = list[tuple[str, int]]
"""Each host, and how many ranks it can run."""
LOCAL = ("localhost", "127.0.0.1")


def from_text(text: str, what: str) -> Slots:
    """Return the hosts of ``worker-0:2,worker-1:2``.

    Args:
        text: the hosts.
        what: what the user wrote before them, for errors: ``"-H "`` or ``"hosts="``.

    Raises:
        ConfigurationError: a word in it is not a host and its slots.
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


def from_file(path: str) -> Slots:
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
