# SPDX-License-Identifier: Apache-2.0
"""One host's part of a job that is started over ssh: what it is told, and how the two ends tell each other.

Values and text only. Each message is one line of JSON. Those of the host share its stdout with what the ranks write,
and stand behind a mark that no rank knows. Imported by both ends, ``ssh`` and ``remote``.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from rankwise.errors import ConfigurationError, LaunchError, RankwiseError
from rankwise.launch.options import LaunchOptions

Message = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """What a host is to run, as which of the job's hosts."""

    folder: str
    """The working directory."""
    target: str
    is_module: bool
    arguments: tuple[str, ...]
    options: LaunchOptions
    """Of this host alone: nothing in them speaks of others."""
    nodes: tuple[int, int]
    """The fewest and the most hosts that the job runs on."""
    node_rank: int
    """The host of number 0 serves the job."""
    peers: tuple[str, ...]
    """Addresses of the other hosts, for the first to find the network that leads there."""
    secret: str = field(repr=False)
    """Of this job: drawn for it, never in a file nor among a process's words."""
    variables: dict[str, str]
    """Environment variables that are passed on."""


def part_to_dict(part: Part) -> Message:
    """Return a part as JSON can carry it."""
    return asdict(part)


def part_from_dict(told: Message) -> Part:
    """Return the part that :func:`part_to_dict` was given."""
    options: dict[str, Any] = {**told["options"], "nodes": tuple(told["options"]["nodes"])}
    fields: dict[str, Any] = {**told, "options": LaunchOptions(**options)}
    fields |= {name: tuple(told[name]) for name in ("arguments", "nodes", "peers")}
    return Part(**fields)


def error_to_dict(error: RankwiseError) -> Message:
    """Return an error as JSON can carry it."""
    is_mistake = isinstance(error, ConfigurationError)
    return {
        "is_mistake": is_mistake,
        "what": error.what,
        "where": error.where,
        "evidence": error.evidence,
        "do": error.do,
    }


def error_from_dict(told: Message) -> ConfigurationError | LaunchError:
    """Return the error that :func:`error_to_dict` was given."""
    kind = ConfigurationError if told["is_mistake"] else LaunchError
    return kind(told["what"], where=told["where"], evidence=told["evidence"], do=told["do"])


def mark(token: str) -> bytes:
    """Return what stands before each message of a host; ``token`` was drawn for this job."""
    return f"\x1erankwise {token} ".encode()


def line(message: Message) -> bytes:
    """Return a message as one line."""
    return json.dumps(message).encode() + b"\n"


class Unmarking:
    """Takes what a host writes to stdout apart: its messages, and what its ranks wrote."""

    def __init__(self, token: str) -> None:
        self._mark = mark(token)
        self._held = b""

    def take(self, data: bytes) -> tuple[bytes, list[Message]]:
        """Return what of ``data``, and of what was held back before, is the ranks', and the messages in it."""
        self._held += data
        output, messages = b"", []
        while True:
            before, found, behind = self._held.partition(self._mark)
            if not found:
                end = len(before) - self._num_of_mark_at_end(before)
                self._held = before[end:]
                return output + before[:end], messages
            text, end_of_line, rest = behind.partition(b"\n")
            output += before
            if not end_of_line:
                self._held = found + text
                return output, messages
            messages.append(json.loads(text))
            self._held = rest

    def _num_of_mark_at_end(self, data: bytes) -> int:
        """Return how many bytes at the end of ``data`` may be the beginning of a mark."""
        start = data.rfind(self._mark[:1], max(0, len(data) - len(self._mark)))
        return len(data) - start if start >= 0 and self._mark.startswith(data[start:]) else 0
