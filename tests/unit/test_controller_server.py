# SPDX-License-Identifier: Apache-2.0
"""The controller of a job and the agent in its own process, which it serves without a socket."""

from __future__ import annotations

import select
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Protocol

import pytest

from rankwise.errors import LaunchError
from rankwise.launch.controller import link as link_module
from rankwise.launch.controller.coordinator import Coordinator
from rankwise.launch.controller.link import ControllerLost, open_link
from rankwise.launch.controller.server import JobServer, TorchStores
from rankwise.launch.messages import EndJob, Heartbeat, Hello, Message, Node, RankEnds, RanksEnded, StartAttempt
from rankwise.store import wire

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

    from rankwise.launch.controller.link import ControllerLink, LocalLink

SECRET = b"of this test"


class Serve(Protocol):
    """Serves a job of so many nodes, at a port of its own or at one that is given; returns its server and its port."""

    def __call__(self, num_nodes: int, listener: socket.socket | None = None) -> tuple[JobServer, int]: ...


@pytest.fixture
def serve() -> Iterator[Serve]:
    with ExitStack() as opened:

        def start(num_nodes: int, listener: socket.socket | None = None) -> tuple[JobServer, int]:
            coordinator = Coordinator(
                nodes=(num_nodes, num_nodes),
                max_restarts=0,
                rendezvous="here",
                timeout_seconds=10,
                now=time.monotonic(),
                run_id="run",
            )
            listener = listener or wire.listen("127.0.0.1", 0)
            port = listener.getsockname()[1]
            stores = TorchStores("127.0.0.1", "127.0.0.1", "off", on_one_machine=False)
            server = JobServer(listener, SECRET, coordinator, stores)
            opened.callback(server.close)
            return server, port

        yield start


def hello(name: str, *, serves: bool = False) -> Hello:
    return Hello(node=Node(node_id=name, hostname=name, num_ranks=1, serves=serves))


def next_message(link: LocalLink | ControllerLink, kind: type[Message]) -> Message:
    """Return the next message of a kind; others before it are ignored."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if select.select([link], [], [], 0.1)[0]:
            for message in link.receive():
                if isinstance(message, kind):
                    return message
    raise TimeoutError(kind.__name__)


def test_the_agent_of_the_same_process_takes_part_without_a_socket(
    serve: Serve,
) -> None:
    server, _ = serve(1)
    link = server.connect(hello("a", serves=True))
    start = next_message(link, StartAttempt)
    assert isinstance(start, StartAttempt)
    assert (start.world_size, start.hostnames) == (1, ("a",))
    link.send(RanksEnded(attempt=0, report=RankEnds()))
    assert next_message(link, EndJob) == EndJob(exit_code=0)
    link.close()


def test_it_takes_part_beside_one_that_connects(serve: Serve) -> None:
    server, port = serve(2)
    own = server.connect(hello("a", serves=True))
    other = open_link(
        ("127.0.0.1", port), SECRET, hello("b"), timeout_seconds=10, between=lambda: None, show=lambda _: None
    )
    starts = [next_message(link, StartAttempt) for link in (own, other)]
    assert [one.first_rank for one in starts if isinstance(one, StartAttempt)] == [0, 1]
    assert next_message(other, Heartbeat) == Heartbeat()
    for link in (own, other):
        link.send(RanksEnded(attempt=0, report=RankEnds()))
    assert [next_message(link, EndJob) for link in (own, other)] == [EndJob(exit_code=0)] * 2
    own.close()
    other.close()


def test_a_controller_that_fails_is_lost(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("no port is left")

    monkeypatch.setattr(TorchStores, "of_attempt", fail)
    server, _ = serve(1)
    link = server.connect(hello("a", serves=True))
    with pytest.raises(ControllerLost, match="no port is left"):
        next_message(link, StartAttempt)
    link.close()


def test_a_stranger_version_is_named_and_refused(serve: Serve) -> None:
    _, port = serve(1)
    connection = wire.open_connection("127.0.0.1", port, SECRET, "agent", 5)
    wire.send_frame(connection, b'{"node": {"node_id": "b"}}')
    answer = wire.receive_frame(connection, 1 << 16)
    assert b'"kind": "Refuse"' in answer
    assert b"the launcher at 127.0.0.1 port" in answer
    connection.close()


def test_a_signal_ends_the_wait_for_a_rendezvous_that_nothing_serves() -> None:
    with wire.listen("127.0.0.1", 0) as unused:
        port = unused.getsockname()[1]
    num_checks = 0

    def between() -> None:
        nonlocal num_checks
        num_checks += 1
        if num_checks > 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_link(("127.0.0.1", port), SECRET, hello("a"), timeout_seconds=10, between=between, show=lambda _: None)


@pytest.mark.parametrize(
    ("listens_first", "shown"),
    [
        (True, "[rankwise] the launcher at 127.0.0.1:{} has started and is getting ready\n"),
        (False, "[rankwise] waiting for the rendezvous at 127.0.0.1:{}: nothing listens there yet\n"),
    ],
)
def test_those_who_wait_show_whether_the_launcher_has_started(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, shown: str, *, listens_first: bool
) -> None:
    monkeypatch.setattr(wire, "SILENCE_POLL_SECONDS", 0.01)
    monkeypatch.setattr(link_module, "CONNECT_NOTICE_SECONDS", 0.0)
    listener = wire.listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    if not listens_first:
        listener.close()
    texts: list[str] = []

    def show(text: str) -> None:
        texts.append(text)
        serve(1, listener if listens_first else wire.listen("127.0.0.1", port))

    # A launcher that listens is waited for beyond the limit, which is over at once.
    seconds = 0.0 if listens_first else 10.0
    link = open_link(("127.0.0.1", port), SECRET, hello("b"), timeout_seconds=seconds, between=lambda: None, show=show)
    assert isinstance(next_message(link, StartAttempt), StartAttempt)
    assert texts == [shown.format(port)]
    link.close()


@pytest.mark.parametrize(
    ("limit_seconds", "error", "words"),
    [(0.05, LaunchError, "accepts connections, but sent nothing"), (1000.0, KeyboardInterrupt, "a signal")],
)
def test_a_program_that_listens_and_sends_nothing_is_waited_for_until_a_limit_or_a_signal(
    monkeypatch: pytest.MonkeyPatch, limit_seconds: float, error: type[BaseException], words: str
) -> None:
    monkeypatch.setattr(wire, "SILENCE_POLL_SECONDS", 0.01)
    monkeypatch.setattr(link_module, "STARTING_SECONDS", limit_seconds)
    texts: list[str] = []

    def between() -> None:
        if texts and error is KeyboardInterrupt:
            raise KeyboardInterrupt("a signal")

    with wire.listen("127.0.0.1", 0) as listener:
        address = listener.getsockname()[:2]
        with pytest.raises(error, match=words):
            open_link(address, SECRET, hello("a"), timeout_seconds=0.0, between=between, show=texts.append)
    assert len(texts) == 1
