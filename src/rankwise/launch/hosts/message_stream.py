# SPDX-License-Identifier: Apache-2.0
"""How ``rankwise run --hosts`` and a host exchange messages over ssh: lines of JSON on the host's stdin and stdout.

A host's messages share its stdout with the output of its ranks, and follow a mark that no rank knows. Imported by
both ends, ``ssh_sessions`` and ``remote``.
"""

from __future__ import annotations

import re

from rankwise.launch.messages import Message, decode, encode


def mark(token: str) -> bytes:
    """Return the prefix of each message of a host; ``token`` was generated for this job."""
    return f"\x1erankwise {token} ".encode()


def line(message: Message) -> bytes:
    """Return a message as one line."""
    return encode(message) + b"\n"


class MessageExtractor:
    """Splits the stdout of a host into its messages and the output of its ranks."""

    def __init__(self, token: str, host: str) -> None:
        """Take the token of the job, and the name of the host for errors."""
        self._host = host
        self._mark = mark(token)
        self._message = re.compile(re.escape(self._mark) + rb"([^\n]*)\n")
        self._held = b""

    def take(self, data: bytes) -> tuple[bytes, list[Message]]:
        """Return the output of the ranks in ``data`` and in data held back before, and the messages in it.

        Raises:
            MessageError: the text after a mark is not a message.
        """
        # Output and messages alternate.
        *parts, output = self._message.split(self._held + data)
        # No message contains the mark's first byte.
        _, begun, rest = output.rpartition(self._mark[:1])
        tail = begun + rest
        self._held = tail if begun and (tail.startswith(self._mark) or self._mark.startswith(tail)) else b""
        shown = b"".join(parts[::2]) + output[: len(output) - len(self._held)]
        return shown, [decode(text, self._host) for text in parts[1::2]]
