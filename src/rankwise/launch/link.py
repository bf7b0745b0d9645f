# SPDX-License-Identifier: Apache-2.0
"""This machine's connection to the job's coordinator: messages both ways, and whether it still lives.

Decides nothing. Messages are JSON. Imported by the agent and by the launcher's start.
"""

from __future__ import annotations

import errno
import json
import select
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

from rankwise.errors import LaunchError
from rankwise.launch.coordinator import LOST_SECONDS
from rankwise.network import is_loopback
from rankwise.store import wire

if TYPE_CHECKING:
    from collections.abc import Callable

Message = dict[str, Any]

PURPOSE = "agent"
LARGEST_MESSAGE_BYTES = 1 << 24
SIGN_SECONDS = 1.0
"""Between two signs of life."""
TRY_SECONDS = 1.0
"""How long one try to connect takes at most, so that Ctrl-C is heard in between."""
NOTICE_SECONDS = 5.0
"""After how long it is said what is waited for."""


class LinkLost(ConnectionError):
    """The coordinator cannot be heard any more."""


class Link:
    """One open connection."""

    def __init__(self, connection: socket.socket, hello: Message) -> None:
        self._connection = connection
        self._connection.settimeout(LOST_SECONDS)
        self._sending = threading.Lock()
        self._arrived = b""
        self._heard = time.monotonic()
        self._is_closed = threading.Event()
        self.send(hello)
        # A thread: whoever reads what the launcher says may keep it waiting.
        threading.Thread(target=self._give_signs, name="rankwise-link", daemon=True).start()

    def fileno(self) -> int:
        """Return the descriptor that is readable when there is something to hear."""
        return self._connection.fileno()

    def send(self, message: Message) -> None:
        """Send a message. May be called from any thread.

        Raises:
            LinkLost: it cannot be sent.
        """
        data = json.dumps(message).encode()
        try:
            with self._sending:
                wire.send_frame(self._connection, data)
        except OSError as error:
            raise LinkLost(str(error)) from error

    def check(self) -> None:
        """See that the other end gives signs of life.

        Raises:
            LinkLost: the coordinator has been silent too long.
        """
        silent_seconds = time.monotonic() - self._heard
        if silent_seconds > LOST_SECONDS and not select.select([self._connection], [], [], 0)[0]:
            message = f"no word from it for {silent_seconds:.0f} s"
            raise LinkLost(message)

    def _give_signs(self) -> None:
        while not self._is_closed.wait(SIGN_SECONDS):
            try:
                self.send({"do": "alive"})
            except (LinkLost, ValueError):
                # The agent finds out by itself.
                return

    def receive(self) -> list[Message]:
        """Return the messages that have arrived; call it when the descriptor is readable.

        Raises:
            LinkLost: the other end is gone.
        """
        try:
            data = self._connection.recv(1 << 16, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except OSError as error:
            raise LinkLost(str(error)) from error
        if not data:
            message = "its launcher has ended"
            raise LinkLost(message)
        self._heard = time.monotonic()
        self._arrived += data
        messages: list[Message] = []
        while len(self._arrived) >= wire.NUMBER.size:
            try:
                length = wire.checked_length(self._arrived[: wire.NUMBER.size], LARGEST_MESSAGE_BYTES)
            except ConnectionError as error:
                raise LinkLost(str(error)) from error
            end = wire.NUMBER.size + length
            if len(self._arrived) < end:
                break
            messages.append(json.loads(self._arrived[wire.NUMBER.size : end]))
            self._arrived = self._arrived[end:]
        return messages

    def close(self) -> None:
        """Close the connection."""
        self._is_closed.set()
        self._connection.close()


def open_link(
    address: tuple[str, int],
    secret: bytes,
    hello: Message,
    *,
    timeout_seconds: float,
    between: Callable[[], None],
    say: Callable[[str], None],
) -> Link:
    """Return a connection to the coordinator, trying until there is one.

    Args:
        address: where it listens.
        secret: of the job.
        hello: how this machine introduces itself.
        timeout_seconds: how long to try.
        between: called between two tries; may raise.
        say: shows text to the person.

    Raises:
        LaunchError: nothing answered in time.
        SecretRefused: the coordinator has another secret.
    """
    host, port = address
    start = time.monotonic()
    has_said = False
    while True:
        between()
        try:
            return Link(wire.open_connection(host, port, secret, PURPOSE, TRY_SECONDS), hello)
        except (TimeoutError, LinkLost) as error:
            waited = time.monotonic() - start
            if waited > timeout_seconds or _is_hopeless(error, host):
                raise LaunchError(
                    f"Nothing answered at the rendezvous {host}:{port} for {waited:.0f} s.",
                    evidence=str(error),
                    do="start the first machine's `rankwise run`, or look at the way there: "
                    f"rankwise doctor, nc -vz {host} {port}",
                ) from None
            if waited > NOTICE_SECONDS and not has_said:
                has_said = True
                say(f"[rankwise] waiting for the rendezvous at {host}:{port}: {error}\n")


def _is_hopeless(error: Exception, host: str) -> bool:
    """Return whether an error cannot go away by itself: no machine's own loopback comes up later."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno == errno.ENETUNREACH and is_loopback(host)
