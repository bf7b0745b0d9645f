# SPDX-License-Identifier: Apache-2.0
"""An agent's connection to the job's coordinator: messages both ways, and whether it is still alive.

Decides nothing. Imported by the agent, by the launcher's start, and by the server, which makes that of its own process.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from rankwise.errors import LaunchError, RankwiseError
from rankwise.launch.controller.coordinator import LOST_SECONDS, STARTING_SECONDS
from rankwise.launch.messages import (
    LARGEST_MESSAGE_BYTES,
    PURPOSE,
    Heartbeat,
    Hello,
    Message,
    NodeStarting,
    decode,
    encode,
)
from rankwise.store import wire
from rankwise.world.network import is_loopback

if TYPE_CHECKING:
    from collections.abc import Callable

HEARTBEAT_SECONDS = 1.0
"""Between two heartbeats."""
CONNECT_TRY_SECONDS = 1.0
"""The limit of one attempt to connect, so that Ctrl-C is noticed in between."""
CONNECT_NOTICE_SECONDS = 5.0
"""After how long a wait is logged."""


class ControllerLost(ConnectionError):
    """The connection to the coordinator was closed, or nothing is received over it."""


class ControllerLink:
    """One open connection to another process."""

    def __init__(self, connection: socket.socket, hello: Hello) -> None:
        self._connection = connection
        self._connection.settimeout(LOST_SECONDS)
        self._sender = "the controller at {} port {}".format(*connection.getpeername()[:2])
        self._sending = threading.Lock()
        self._arrived = b""
        self._last_received = time.monotonic()
        self._is_closed = threading.Event()
        self.send(hello)
        # In a thread: the reader of the launcher's output may block it.
        threading.Thread(target=self._send_heartbeats, name="rankwise-link", daemon=True).start()

    def fileno(self) -> int:
        """Return the descriptor that is readable when a message has arrived."""
        return self._connection.fileno()

    def send(self, message: Message) -> None:
        """Send a message. May be called from any thread.

        Raises:
            ControllerLost: it cannot be sent.
        """
        data = encode(message)
        try:
            with self._sending:
                wire.send_frame(self._connection, data)
        except OSError as error:
            raise ControllerLost(str(error)) from error

    def check(self) -> None:
        """Check that the other end sends heartbeats.

        Raises:
            ControllerLost: the coordinator has been silent too long.
        """
        silent_seconds = time.monotonic() - self._last_received
        if silent_seconds > LOST_SECONDS and not select.select([self._connection], [], [], 0)[0]:
            message = f"no heartbeat for {silent_seconds:.0f} s"
            raise ControllerLost(message)

    def _send_heartbeats(self) -> None:
        while not self._is_closed.wait(HEARTBEAT_SECONDS):
            try:
                self.send(Heartbeat())
            except (ControllerLost, ValueError):
                # The agent notices by itself.
                return

    def receive(self) -> list[Message]:
        """Return the messages that have arrived; call it when the descriptor is readable.

        Raises:
            ControllerLost: the other end has closed the connection.
        """
        try:
            data = self._connection.recv(1 << 16, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except OSError as error:
            raise ControllerLost(str(error)) from error
        if not data:
            message = "its launcher has exited"
            raise ControllerLost(message)
        self._last_received = time.monotonic()
        self._arrived += data
        messages: list[Message] = []
        while len(self._arrived) >= wire.NUMBER.size:
            try:
                length = wire.checked_length(self._arrived[: wire.NUMBER.size], LARGEST_MESSAGE_BYTES)
            except ConnectionError as error:
                raise ControllerLost(str(error)) from error
            end = wire.NUMBER.size + length
            if len(self._arrived) < end:
                break
            messages.append(decode(self._arrived[wire.NUMBER.size : end], self._sender))
            self._arrived = self._arrived[end:]
        return messages

    def close(self) -> None:
        """Close the connection."""
        self._is_closed.set()
        self._connection.close()


class LocalLink:
    """The link of the agent in the serving process: messages are passed directly, without a socket."""

    def __init__(self, send: Callable[[Message], None], leave: Callable[[], None]) -> None:
        """Take the functions that forward messages and close this link; created by ``JobServer.connect``."""
        self._send, self._leave = send, leave
        self._received: deque[Message] = deque()
        self._problem = ""
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)

    def fileno(self) -> int:
        """Return the descriptor that is readable when a message has arrived."""
        return self._reader

    def send(self, message: Message) -> None:
        """Send a message. May be called from any thread."""
        self._send(message)

    def check(self) -> None:
        """Check nothing: both ends live in this process."""

    def receive(self) -> list[Message]:
        """Return the messages that have arrived.

        Raises:
            ControllerLost: the controller failed.
        """
        with contextlib.suppress(BlockingIOError):
            os.read(self._reader, 4096)
        if self._problem:
            raise ControllerLost(self._problem)
        return [self._received.popleft() for _ in range(len(self._received))]

    def close(self) -> None:
        """Leave the job."""
        self._leave()

    def deliver(self, message: Message) -> None:
        """Deliver a message of the controller, on its thread."""
        self._received.append(message)
        self._wake()

    def break_off(self, problem: str) -> None:
        """Notify the agent that the controller failed."""
        self._problem = problem
        self._wake()

    def _wake(self) -> None:
        # A full pipe wakes the agent as well.
        with contextlib.suppress(BlockingIOError):
            os.write(self._writer, b"!")

    def release(self) -> None:
        """Close the descriptors, once no more messages are delivered."""
        os.close(self._reader)
        os.close(self._writer)


AgentLink = ControllerLink | LocalLink


# -- the wait for a coordinator -----------------------------------------------------------------------------


class _Wait:
    """The wait for the coordinator of a job: what is shown of it, and when it is over."""

    def __init__(
        self,
        address: tuple[str, int],
        timeout_seconds: float,
        *,
        between: Callable[[], None],
        show: Callable[[str], None],
    ) -> None:
        self._host, self._port = address
        self._between = between
        self._show = show
        self._start = time.monotonic()
        self._deadline = self._start + timeout_seconds
        self._has_shown = False
        self._is_starting = False

    def note_error(self, error: Exception) -> None:
        """Continue after an attempt to connect that failed; raise if it was the last."""
        now = time.monotonic()
        why = "nothing listens there yet" if isinstance(error.__cause__, ConnectionRefusedError) else str(error)
        if now > self._deadline or _is_hopeless(error, self._host):
            raise LaunchError(
                f"The rendezvous {self._host}:{self._port} did not answer within {now - self._start:.0f} s.",
                evidence=str(error),
                do="start `rankwise run` on the first machine, or check the route to it: "
                f"rankwise doctor, nc -vz {self._host} {self._port}",
            ) from None
        if now - self._start > CONNECT_NOTICE_SECONDS and not self._has_shown:
            self._has_shown = True
            self._show(f"[rankwise] waiting for the rendezvous at {self._host}:{self._port}: {why}\n")

    def note_silence(self) -> None:
        """Continue while a connection was accepted that nothing is sent over; raise if that takes too long.

        A launcher listens before it imports torch, so its job will be served: the limit of the wait no longer applies.
        """
        self._between()
        now = time.monotonic()
        if not self._is_starting:
            self._is_starting = True
            self._deadline = max(self._deadline, now + STARTING_SECONDS)
            self._show(f"[rankwise] the launcher at {self._host}:{self._port} has started and is getting ready\n")
        if now > self._deadline:
            raise LaunchError(
                f"The rendezvous {self._host}:{self._port} accepts connections, but sent nothing within "
                f"{now - self._start:.0f} s.",
                evidence="its launcher has not finished importing torch, or another program listens there",
                do="look at the output of `rankwise run` on the first machine, and at what listens there: "
                f"ss -ltnp 'sport = :{self._port}' on {self._host}",
            )


def open_link(
    address: tuple[str, int],
    secret: bytes,
    hello: Hello,
    *,
    timeout_seconds: float,
    between: Callable[[], None],
    show: Callable[[str], None],
) -> ControllerLink:
    """Return a connection to the coordinator; retry until there is one.

    Calls ``between``, which may raise, before each attempt and while one waits, and shows a line if the wait is long.
    The time limit applies until something listens there; then it is at least ``STARTING_SECONDS`` more.

    Raises:
        LaunchError: nothing answered in time.
        SecretRefused: the coordinator has another secret.
    """
    wait = _Wait(address, timeout_seconds, between=between, show=show)
    while True:
        between()
        try:
            connection = wire.open_connection(
                *address, secret, PURPOSE, CONNECT_TRY_SECONDS, while_silent=wait.note_silence
            )
            return ControllerLink(connection, hello)
        except (TimeoutError, ControllerLost) as error:
            wait.note_error(error)


def announce(address: tuple[str, int], secret: bytes) -> None:
    """Notify the coordinator that this machine's launcher has started; do nothing if it cannot be reached.

    A job that waits for the return of a machine then waits until it has imported torch.
    """
    # The link, which is opened later, reports the same errors.
    with (
        contextlib.suppress(OSError, RankwiseError),
        wire.open_connection(*address, secret, PURPOSE, STARTING_SECONDS) as connection,
    ):
        wire.send_frame(connection, encode(NodeStarting(hostname=socket.gethostname())))


def _is_hopeless(error: Exception, host: str) -> bool:
    """Return whether an error is permanent: an address of another machine's loopback never becomes reachable."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno == errno.ENETUNREACH and is_loopback(host)
