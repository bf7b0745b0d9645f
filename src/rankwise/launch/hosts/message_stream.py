# SPDX-License-Identifier: Apache-2.0
"""How ``rankwise run --hosts`` and a host exchange messages over ssh: lines of JSON on the host's stdin and stdout.

A host's messages share its stdout with what its ranks write, and come behind a mark that no rank knows. Imported by
both ends, ``ssh`` and ``remote``.
"""

from __future__ import annotations

from rankwise.errors import ConfigurationError, LaunchError, RankwiseError
from rankwise.launch.messages import HostRefused, Message, decode, encode


def refusal(error: RankwiseError) -> HostRefused:
    """Return the message that a host cannot take part because of ``error``."""
    return HostRefused(
        is_mistake=isinstance(error, ConfigurationError),
        what=error.what,
        where=error.where,
        evidence=error.evidence,
        advice=error.do,
    )


def error_of(refused: HostRefused) -> ConfigurationError | LaunchError:
    """Return the error that :func:`refusal` was given."""
    kind = ConfigurationError if refused.is_mistake else LaunchError
    return kind(refused.what, where=refused.where, evidence=refused.evidence, do=refused.advice)


def mark(token: str) -> bytes:
    """Return what stands before each message of a host; ``token`` was drawn for this job."""
    return f"\x1erankwise {token} ".encode()


def line(message: Message) -> bytes:
    """Return a message as one line."""
    return encode(message) + b"\n"


class MessageExtractor:
    """Takes what a host writes to stdout apart: its messages, and what its ranks wrote."""

    def __init__(self, token: str, host: str) -> None:
        """Take the token of the job, and the name of the host for errors."""
        self._host = host
        self._mark = mark(token)
        self._held = b""

    def take(self, data: bytes) -> tuple[bytes, list[Message]]:
        """Return what of ``data``, and of what was held back before, is the ranks', and the messages in it.

        Raises:
            MessageError: what stands behind a mark is no message.
        """
        self._held += data
        output = b""
        messages: list[Message] = []
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
            self._held = rest
            messages.append(decode(text, self._host))

    def _num_of_mark_at_end(self, data: bytes) -> int:
        """Return how many bytes at the end of ``data`` may be the beginning of a mark."""
        start = data.rfind(self._mark[:1], max(0, len(data) - len(self._mark)))
        return len(data) - start if start >= 0 and self._mark.startswith(data[start:]) else 0
