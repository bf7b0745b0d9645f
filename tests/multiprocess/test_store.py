# SPDX-License-Identifier: Apache-2.0
"""The job's own store over real sockets: authentication, discovery, and its end."""

from __future__ import annotations

import json
import os
import signal
import stat
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from socket import SHUT_RDWR
from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist
from stranger import LOOPBACK, SECRET, greet

from rankwise.errors import ConfigurationError, NotRankwise, SecretRefused
from rankwise.store import bootstrap, client, keys, opening
from rankwise.store.bootstrap import ARRIVED_KEY, RankAddress, conclude, exchange_rank_addresses, rank_address_key
from rankwise.store.client import Store, StoreConnection, StoreLost
from rankwise.store.keys import PURPOSE, REQUEST
from rankwise.store.opening import connect, connect_published, serve, serve_published
from rankwise.store.server import AuthenticatedServer
from rankwise.store.wire import (
    HANDSHAKE_FRAME_BYTES,
    Answer,
    Nonces,
    hello,
    listen,
    new_nonce,
    open_connection,
    pack_fields,
    proof,
    receive_frame,
    send_frame,
)
from rankwise.world.device.choice import Sight
from rankwise.world.environments.reading import Reading

if TYPE_CHECKING:
    import socket
    from asyncio import StreamReader, StreamWriter
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from rankwise.store.shared_socket import SharedSocket


def shared_of(store: Store) -> SharedSocket:
    assert isinstance(store._connection, StoreConnection)
    return store._connection._shared


@contextmanager
def served(secret: bytes = SECRET) -> Iterator[tuple[Store, int]]:
    store, port = serve(secret=secret)
    try:
        yield store, port
    finally:
        store.close()


def test_a_rank_that_comes_after_the_others_have_said_so_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    late = RankAddress(hostname="late", address=None)
    said: list[str] = []

    with served() as (store, port):
        other = connect(LOOPBACK, port, 10, secret=SECRET)

        def say(text: str, *, all_ranks: bool) -> None:
            assert all_ranks
            said.append(text)
            other.set(rank_address_key(1), json.dumps(asdict(late)))
            assert other.add(ARRIVED_KEY, 1) == 2
            conclude(other, 2)

        monkeypatch.setattr(bootstrap, "NOTICE_SECONDS", 0.05)
        monkeypatch.setattr(bootstrap, "warn", say)
        found = exchange_rank_addresses(store, Reading(rank=0, world_size=2, source="env"), 20, Sight())
    assert (found.num_nodes, found.node_rank, list(found.on_host)) == (2, 0, [0])
    assert len(said) == 1
    assert "for rank 1:" in said[0]


def test_a_last_arrival_that_is_killed_before_it_concludes_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    killed = RankAddress(hostname="killed", address=None)
    monkeypatch.setattr(bootstrap, "NOTICE_SECONDS", 0.05)
    with served() as (store, _):
        store.set(rank_address_key(1), json.dumps(asdict(killed)))
        found = exchange_rank_addresses(store, Reading(rank=0, world_size=2, source="env"), 60, Sight())
    assert (found.num_nodes, found.node_rank, list(found.on_host)) == (2, 0, [0])


def test_calls_take_the_connection_that_was_opened_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    def counted(host: str, port: int, secret: bytes, purpose: bytes, timeout_seconds: float) -> socket.socket:
        opened.append(host)
        return open_connection(host, port, secret, purpose, timeout_seconds)

    with served() as (_, port):
        monkeypatch.setattr(client, "open_connection", counted)
        store = connect(LOOPBACK, port, 10, secret=SECRET)
        store.set("key", "value")
        assert store.get("key", 10) == b"value"
    assert opened == [LOOPBACK]


def test_a_store_keeps_the_values_that_were_set() -> None:
    with served() as (store, port):
        other = connect(LOOPBACK, port, 10, secret=SECRET)
        other.set("key", b"\0\xff")
        assert store.get("key", 10) == b"\0\xff"
        assert (store.add("n", 3), other.add("n", -1)) == (3, 2)
        part = other.prefixed("a").prefixed("b").clone()
        assert part.set_if_absent("first", "one")
        assert not part.set_if_absent("first", "two")
        assert store.check("a/b/first")
        part.delete("first")
        assert not part.check("first")
        for one in (store, other, part):
            with pytest.raises(TimeoutError, match="absent was not set in the job's store in time"):
                one.get("absent", 0.05)
        # A wait on one connection ends by a word on another.
        setter = threading.Thread(target=lambda: store.set("a/b/late", "value"))
        setter.start()
        part.wait(["late"], 10)
        setter.join()


class _DeletedMeanwhile(dist.HashStore):
    """Torch's store, in which another rank deletes a key between any two calls of this one."""

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        super().wait(keys, timeout or timedelta(seconds=300))
        self.delete_key(keys[0])


def test_a_key_of_torchs_store_that_is_deleted_meanwhile_is_not_waited_for_without_the_limit() -> None:
    connection = _DeletedMeanwhile()
    store = Store(connection)
    ended: list[object] = []

    def get() -> None:
        try:
            ended.append(store.get("key", 0.5))
        except TimeoutError as error:
            ended.append(error)

    store.set("key", "value")
    getter = threading.Thread(target=get, daemon=True)
    getter.start()
    getter.join(60)  # Torch's own limit is 300 s.
    assert isinstance(ended[0], TimeoutError)
    assert store.peek("key") is None
    store.set("key", b"\0\xff")
    assert store.peek("key") == b"\0\xff"


def test_torch_uses_it_as_any_other_store() -> None:
    with served() as (store, _):
        kept = store.prefixed("group")
        prefixed = dist.PrefixStore("inner", kept.torch_store)
        prefixed.set("key", "value")
        assert prefixed.get("key") == b"value"
        assert store.get("group/inner/key", 1) == b"value"
        assert prefixed.compare_set("key", "value", "other") == b"other"
        # As torch's own store answers for a key that nobody has set.
        assert prefixed.compare_set("new", "expected", "value") == b"expected"
        assert not prefixed.check(["new"])
        prefixed.append("key", "!")
        prefixed.multi_set(["a", "b"], ["1", "2"])
        assert prefixed.multi_get(["key", "a", "b"]) == [b"other!", b"1", b"2"]
        assert (prefixed.num_keys(), prefixed.delete_key("a"), prefixed.delete_key("a")) == (3, True, False)
        prefixed.set_timeout(timedelta(seconds=0.05))
        with pytest.raises(dist.DistStoreError, match="timeout"):
            prefixed.get("absent")
        with pytest.raises(dist.DistStoreError, match=r"timeout after 0\.050 s"):
            prefixed.wait(["absent"], timedelta(seconds=0.05))


def test_a_bad_call_is_refused_and_does_not_affect_other_calls() -> None:
    with served() as (store, port):
        store.set("text", "abc")
        with pytest.raises(ConfigurationError, match="text holds b'abc', which is not a number"):
            store.add("text", 1)
        with open_connection(LOOPBACK, port, SECRET, PURPOSE, 10) as sock:
            for request in (b"", b"\xff", pack_fields([b"unknown"]), pack_fields([b"set", b"\xff", b""])):
                send_frame(sock, REQUEST.pack(1) + request)
                assert receive_frame(sock, 1000)[REQUEST.size + 4 :][:1] == b"\x02"
        assert store.get("text", 1) == b"abc"


def test_a_wrong_secret_is_refused_with_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with served() as (_, port):
        with pytest.raises(SecretRefused, match="do not hold the same secret") as caught:
            connect(LOOPBACK, port, 10, secret=b"another")
        assert "RANKWISE_SECRET" in str(caught.value)
        assert "~/.config/rankwise/secret" in str(caught.value)
        assert "horse" not in str(caught.value)
        monkeypatch.setattr(opening, "DOUBT_SECONDS", 0.3)
        # Torch's client would go on until its own limit.
        with pytest.raises(SecretRefused, match="requires a secret, and this process has none"):
            connect(LOOPBACK, port, 50)
        with pytest.raises(NotRankwise, match="does not serve 'agent'"):
            open_connection(LOOPBACK, port, SECRET, "agent", 10)
    with pytest.raises(ConfigurationError, match="empty"):
        serve(secret=b"")


def test_a_replayed_handshake_is_refused() -> None:
    with served() as (_, port):
        own = new_nonce()
        stranger, nonce = greet(port)
        recorded = [hello(own, PURPOSE), proof(SECRET, b"client", PURPOSE, Nonces(client=own, server=nonce))]
        answers = []
        for sock in (stranger, greet(port)[0]):
            for frame in recorded:
                send_frame(sock, frame)
            answers.append(receive_frame(sock, HANDSHAKE_FRAME_BYTES)[0])
            sock.close()
        assert answers == [Answer.WELCOME, Answer.REFUSED]


def _reflect(listener: socket.socket) -> None:
    """Send everything back, as if the client's own words were a server's."""
    client, _ = listener.accept()
    with client:
        send_frame(client, receive_frame(client, HANDSHAKE_FRAME_BYTES))
        send_frame(client, bytes([Answer.WELCOME]) + receive_frame(client, HANDSHAKE_FRAME_BYTES))


def _end_each(listener: socket.socket) -> None:
    for _ in range(2):
        listener.accept()[0].close()
    _reflect(listener)


def _answer_http(listener: socket.socket) -> None:
    client, _ = listener.accept()
    with client:
        client.recv(1000)
        client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


@pytest.mark.parametrize(
    ("behave", "error", "words"),
    [
        (_reflect, SecretRefused, "do not hold the same secret"),
        (_answer_http, NotRankwise, "its greeting is not that of this version of rankwise"),
        # Proxies do so while what is behind them starts: it is tried again.
        (_end_each, SecretRefused, "do not hold the same secret"),
    ],
)
def test_a_server_without_the_secret_is_detected(behave: object, error: type[Exception], words: str) -> None:
    with listen(LOOPBACK, 0) as listener:
        thread = threading.Thread(target=behave, args=(listener,))  # type: ignore[arg-type]
        thread.start()
        with pytest.raises(error, match=words):
            connect(LOOPBACK, listener.getsockname()[1], 10, secret=SECRET)
        thread.join()


def _answer_every_http(listener: socket.socket) -> None:
    # Ended by the system's error for a listener that was shut down.
    with suppress(OSError):
        while True:
            _answer_http(listener)


@pytest.mark.parametrize("behave", [None, _answer_every_http])
def test_another_program_at_the_port_is_named_where_there_is_no_secret(
    behave: Callable[[socket.socket], None] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's client waits without a limit for a program that sends nothing."""
    monkeypatch.setattr(opening, "DOUBT_SECONDS", 0.5)
    with listen(LOOPBACK, 0) as listener, ThreadPoolExecutor() as threads:
        port = listener.getsockname()[1]
        if behave is not None:
            threads.submit(behave, listener)
        with pytest.raises(NotRankwise, match="not the job's store: it did not answer as one within 1 s") as caught:
            connect(LOOPBACK, port, 1.0)
        listener.shutdown(SHUT_RDWR)
    assert "set MASTER_PORT to another port" in (caught.value.do or "")
    with pytest.raises(TimeoutError, match=rf"nothing answered at {LOOPBACK}:{port} within 0 s: .*Connection refused"):
        connect(LOOPBACK, port, 0.1)


def test_a_missing_file_is_reported_with_the_systems_message() -> None:
    with listen(LOOPBACK, 0) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(TimeoutError, match=rf"nothing answered at 127.0.0.1:{port} within 0 s: .*Connection refused"):
        connect(LOOPBACK, port, 0.2, secret=SECRET)


def test_a_lost_store_is_reported_on_every_connection() -> None:
    with served() as (store, port):
        other = connect(LOOPBACK, port, 10, secret=SECRET)
        errors: list[BaseException] = []

        def wait() -> None:
            try:
                other.wait(["never"], 10.0**8)
            except ConnectionError as error:
                errors.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        store.close()
        store.close()
        waiting.join()
    assert isinstance(errors[0], StoreLost)
    for one in (store, other):
        with pytest.raises(StoreLost, match="the job's store was lost"):
            one.set("key", "")


def test_an_interrupted_wait_leaves_a_connection_of_use() -> None:
    with served() as (store, _):
        before = signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        try:
            with pytest.raises(KeyboardInterrupt):
                store.wait(["never"], 30)
        finally:
            signal.signal(signal.SIGALRM, before)
        # The answer to the wait must not be taken for the answer to this.
        store.set("key", "value")
        assert store.get("key", 1) == b"value"


def _set_until_interrupted(store: Store) -> None:
    while True:
        store.set("large", bytes(2**26))


def test_a_request_that_was_cut_in_two_leaves_the_connection_of_use_to_all_threads() -> None:
    with served() as (store, _):
        other, found = store.clone(), []
        waiting = threading.Thread(target=lambda: found.append(other.get("later", 30)))
        waiting.start()
        before = signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        try:
            with pytest.raises(KeyboardInterrupt):
                _set_until_interrupted(store)
        finally:
            signal.signal(signal.SIGALRM, before)
        store.set("later", "value")
        waiting.join(20)
        assert found == [b"value"]
        other.close()


def test_threads_that_call_during_a_reconnection_wait_for_it() -> None:
    opening_again, may_open = threading.Event(), threading.Event()
    with served() as (_, port), ThreadPoolExecutor(2) as threads:
        store = connect(LOOPBACK, port, 10, secret=SECRET)
        shared = shared_of(store)

        def slow(connect: Callable[[], socket.socket] = shared._connect) -> socket.socket:
            opening_again.set()
            assert may_open.wait(20)
            return connect()

        shared._connect = slow
        shared._cut()
        first = threads.submit(store.set, "a", "1")
        assert opening_again.wait(20)
        second = threads.submit(store.set, "b", "2")
        wait([second], 0.2)
        may_open.set()
        wait([first, second], 20)
        assert (first.exception(), second.exception()) == (None, None)
        assert store.get_all(["a", "b"]) == [b"1", b"2"]
        store.close()


def test_a_reconnection_that_is_refused_is_reported_as_such() -> None:
    with served() as (_, port):
        store = connect(LOOPBACK, port, 10, secret=SECRET)

        def refused(*_: object) -> socket.socket:
            raise SecretRefused("The secret was refused.")

        shared = shared_of(store)
        shared._connect = refused
        shared._cut()
        for _ in range(2):
            with pytest.raises(StoreLost, match="refused"):
                store.set("a", "1")
        store.close()


def test_a_thread_that_sends_while_another_is_interrupted_sends_again() -> None:
    with served() as (store, _):
        shared = shared_of(store)

        class Breaks:
            """A socket that another thread cuts while this one sends."""

            def sendall(self, data: bytes) -> None:
                del data
                shared._cut()
                raise BrokenPipeError("Broken pipe")

            def __getattr__(self, name: str) -> object:
                return getattr(whole, name)

        whole = shared._socket
        shared._socket = Breaks()  # type: ignore[assignment]
        assert store.add("n", 1) == 1
        assert store.add("n", 1) == 2


def test_an_addition_that_another_threads_interrupt_cut_is_a_lost_connection() -> None:
    with served() as (store, _), ThreadPoolExecutor(1) as threads:
        shared, sent = shared_of(store), threading.Event()
        before = shared._socket

        class Cut:
            """A socket whose answer is cut off."""

            def recv(self, size: int) -> bytes:
                before.recv(size)
                sent.set()
                shared._cut()
                return b""

            def __getattr__(self, name: str) -> object:
                return getattr(before, name)

        shared._socket = Cut()  # type: ignore[assignment]
        with pytest.raises(StoreLost, match="interrupt"):
            threads.submit(store.add, "n", 1).result(20)
        assert sent.is_set()
        assert store.add("n", 1) == 2


def test_an_answer_that_is_too_long_is_refused_and_the_connection_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    with served() as (store, _):
        monkeypatch.setattr(keys, "LARGEST_FRAME_BYTES", 1000)
        monkeypatch.setattr(client, "LARGEST_FRAME_BYTES", 1000)
        for key in ("a", "b"):
            store.set(key, bytes(600))
        with pytest.raises(ConfigurationError, match="limit"):
            store.get_all(["a", "b"])
        # The fields of the request: each has a length.
        most = 1000 - 8 - sum(4 + len(word) for word in ("set", "c")) - 4
        with pytest.raises(ConfigurationError, match="too many"):
            store.set("c", bytes(most + 1))
        store.set("c", bytes(most))
        assert store.get("a", 1) == bytes(600)


def test_a_store_is_served_as_long_as_a_clone_is_there() -> None:
    store, port = serve(secret=SECRET)
    clone = store.clone()
    del store
    clone.set("key", "value")
    assert clone.get("key", 1) == b"value"
    del clone
    # Not the end of the thread is waited for here: the last reference has ended it.
    assert not any(thread.name == "rankwise-server" for thread in threading.enumerate())
    with pytest.raises(TimeoutError):
        connect(LOOPBACK, port, 0.05, secret=SECRET)


def test_a_service_of_ones_own_runs_beside_the_store() -> None:
    async def echo(reader: StreamReader, writer: StreamWriter) -> None:
        writer.write(await reader.readexactly(3))
        await writer.drain()

    server = AuthenticatedServer(listen(LOOPBACK, 0), SECRET, {"echo": echo})
    server.start()
    try:
        with open_connection(LOOPBACK, server.port, SECRET, "echo", 10) as sock:
            sock.sendall(b"abc")
            assert (sock.recv(3), sock.recv(1)) == (b"abc", b"")
    finally:
        server.close()
        server.close()


# -- the file of one machine ---------------------------------------------------------------------------


@pytest.mark.parametrize("given", [None, SECRET])
def test_a_published_store_is_found_by_its_file(tmp_path: Path, given: bytes | None) -> None:
    path = tmp_path / "note"
    # Left by a job of the same name that was killed; nobody listens there any more.
    path.write_text(json.dumps({"port": 1, "secret": "old"}))
    path.chmod(0o600)
    found: list[Store] = []
    waiting = threading.Thread(target=lambda: found.append(connect_published(path, 30, given)))
    waiting.start()
    store = serve_published(path, given)
    waiting.join()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert SECRET.decode() not in path.read_text()
    found[0].set("key", "value")
    assert store.get("key", 1) == b"value"
    path.unlink()
    assert list(tmp_path.iterdir()) == []
    store.close()


def test_a_file_whose_port_another_job_has_by_now_is_read_again(tmp_path: Path) -> None:
    path, refused = tmp_path / "note", threading.Event()

    def refuse_all(listener: socket.socket) -> None:
        # Ended by the system's error for a listener that was shut down.
        with suppress(OSError):
            while True:
                _reflect(listener)
                refused.set()

    with listen(LOOPBACK, 0) as other_job, ThreadPoolExecutor() as threads:
        path.write_text(json.dumps({"port": other_job.getsockname()[1], "secret": None}))
        path.chmod(0o600)
        threads.submit(refuse_all, other_job)
        waiting = threads.submit(connect_published, path, 30, SECRET)
        refused.wait(30)
        store = serve_published(path, SECRET)
        wait([waiting])
        other_job.shutdown(SHUT_RDWR)
    try:
        waiting.result().set("key", "value")
        assert store.get("key", 1) == b"value"
    finally:
        store.close()


def test_a_file_that_is_not_ours_is_not_believed(tmp_path: Path) -> None:
    note = {"port": 1, "secret": "theirs"}
    open_to_all = tmp_path / "open"
    open_to_all.write_text(json.dumps(note))
    open_to_all.chmod(0o644)
    link = tmp_path / "link"
    link.symlink_to(open_to_all)
    foreign = tmp_path / "foreign"
    foreign.write_text(json.dumps(note))
    foreign.chmod(0o600)
    os.chown(foreign, 12345, -1)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    for path in (open_to_all, link, foreign, pipe):
        with pytest.raises(ConfigurationError, match="does not belong to this user"):
            connect_published(path, 0.1, None)
    # Serving writes no word through a link.
    store = serve_published(link, None)
    assert not link.is_symlink()
    assert json.loads(open_to_all.read_text()) == note
    store.close()
