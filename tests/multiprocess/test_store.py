# SPDX-License-Identifier: Apache-2.0
"""The job's own store over real sockets: who is let in, what strangers can do, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

from rankwise.errors import ConfigurationError, NotRankwise, SecretRefused
from rankwise.store import Store, StoreLost, connect, opening, serve
from rankwise.store.published import connect_published, forget_published, serve_published
from rankwise.store.server import MOST_STRANGERS, AuthenticatedServer
from rankwise.store.wire import (
    HANDSHAKE_FRAME_BYTES,
    Answer,
    Nonces,
    hello,
    listen,
    new_nonce,
    open_connection,
    pack_fields,
    parse_hello,
    proof,
    receive_frame,
    send_frame,
)

if TYPE_CHECKING:
    from asyncio import StreamReader, StreamWriter
    from collections.abc import Iterator

SECRET = b"correct horse battery staple"
LOOPBACK = "127.0.0.1"
NUM_STEPS = 5
"""How many steps the ranks train while one thing is tried."""


@contextmanager
def served(secret: bytes = SECRET) -> Iterator[tuple[Store, int]]:
    store, port = serve(secret=secret)
    try:
        yield store, port
    finally:
        store.close()


def greet(port: int) -> tuple[socket.socket, bytes]:
    """Connect as a stranger, and return the server's nonce."""
    stranger = socket.create_connection((LOOPBACK, port), 10)
    return stranger, parse_hello(receive_frame(stranger, HANDSHAKE_FRAME_BYTES))[0]


def test_a_store_keeps_what_it_is_told() -> None:
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
            with pytest.raises(TimeoutError, match="nobody set absent in the job's store in time"):
                one.get("absent", 0.05)
        # A wait on one connection ends by a word on another.
        setter = threading.Thread(target=lambda: store.set("a/b/late", "value"))
        setter.start()
        part.wait(["late"], 10)
        setter.join()


def test_torch_uses_it_as_any_other_store() -> None:
    with served() as (store, _):
        kept = store.prefixed("group")
        prefixed = dist.PrefixStore("inner", kept.torch_store)
        prefixed.set("key", "value")
        assert prefixed.get("key") == b"value"
        assert store.get("group/inner/key", 1) == b"value"
        assert prefixed.compare_set("key", "value", "other") == b"other"
        prefixed.append("key", "!")
        prefixed.multi_set(["a", "b"], ["1", "2"])
        assert prefixed.multi_get(["key", "a", "b"]) == [b"other!", b"1", b"2"]
        assert (prefixed.num_keys(), prefixed.delete_key("a"), prefixed.delete_key("a")) == (3, True, False)
        prefixed.set_timeout(timedelta(seconds=0.05))
        with pytest.raises(dist.DistStoreError, match="timeout"):
            prefixed.get("absent")


def test_a_bad_call_is_refused_and_harms_no_other() -> None:
    with served() as (store, port):
        store.set("text", "abc")
        with pytest.raises(ConfigurationError, match="text holds b'abc', which is no number"):
            store.add("text", 1)
        with open_connection(LOOPBACK, port, SECRET, "store", 10) as sock:
            for request in (b"", b"\xff", pack_fields([b"unknown"]), pack_fields([b"set", b"\xff", b""])):
                send_frame(sock, request)
                assert receive_frame(sock, 1000)[4:5] == b"\x02"
        assert store.get("text", 1) == b"abc"


def test_who_holds_another_secret_is_refused_and_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with served() as (_, port):
        with pytest.raises(SecretRefused, match="do not hold the same secret") as caught:
            connect(LOOPBACK, port, 10, secret=b"another")
        assert "RANKWISE_SECRET" in str(caught.value)
        assert "~/.config/rankwise/secret" in str(caught.value)
        assert "horse" not in str(caught.value)
        monkeypatch.setattr(opening, "DOUBT_SECONDS", 0.3)
        # Torch's client would go on until its own limit.
        with pytest.raises(SecretRefused, match="asks for a secret, and this process has none"):
            connect(LOOPBACK, port, 50)
        with pytest.raises(NotRankwise, match="does not serve 'agent'"):
            open_connection(LOOPBACK, port, SECRET, "agent", 10)
    with pytest.raises(ConfigurationError, match="empty"):
        serve(secret=b"")


def test_a_replayed_handshake_is_refused() -> None:
    with served() as (_, port):
        own = new_nonce()
        stranger, nonce = greet(port)
        recorded = [hello(own, "store"), proof(SECRET, b"client", "store", Nonces(client=own, server=nonce))]
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
        (_answer_http, NotRankwise, "its first words are not rankwise's"),
        # Proxies do so while what is behind them starts: it is tried again.
        (_end_each, SecretRefused, "do not hold the same secret"),
    ],
)
def test_a_server_without_the_secret_is_found_out(behave: object, error: type[Exception], words: str) -> None:
    with listen(LOOPBACK, 0) as listener:
        thread = threading.Thread(target=behave, args=(listener,))  # type: ignore[arg-type]
        thread.start()
        with pytest.raises(error, match=words):
            connect(LOOPBACK, listener.getsockname()[1], 10, secret=SECRET)
        thread.join()


def test_nothing_there_is_said_with_the_systems_words() -> None:
    with listen(LOOPBACK, 0) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(TimeoutError, match=rf"nothing answered at 127.0.0.1:{port} within 0 s: .*Connection refused"):
        connect(LOOPBACK, port, 0.2, secret=SECRET)


def test_a_lost_store_is_said_on_every_connection() -> None:
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
        with pytest.raises(StoreLost, match="the job's store is gone"):
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
    forget_published(path)
    assert list(tmp_path.iterdir()) == []
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
        with pytest.raises(ConfigurationError, match="is not this user's own file"):
            connect_published(path, 0.1, None)
    # Serving writes no word through a link.
    store = serve_published(link, None)
    assert not link.is_symlink()
    assert json.loads(open_to_all.read_text()) == note
    store.close()


# -- processes -----------------------------------------------------------------------------------------

SERVER = """
import os, sys, torch
from rankwise.store import client, serve
store, port = serve(secret=sys.argv[1].encode())
reader = store.clone()
print(port, flush=True)
if sys.argv[2] == "fork" and os.fork() == 0:
    try:
        store.get("x", 1)
    except ConnectionError as error:
        print(error, flush=True)
    sys.stdin.read()
    os._exit(0)
if sys.argv[2] == "fork":
    sys.stdin.read()
else:
    # A connection that goes after the names of its module have gone, in the order that an interpreter may choose.
    torch.kept = reader
    client.suppress = None
"""


def start_server(how: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", SERVER, SECRET.decode(), how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_process_that_serves_ends_in_silence() -> None:
    with start_server("exit") as process:
        out, err = process.communicate()
    assert (process.returncode, err) == (0, "")
    assert out.strip().isdecimal()


def test_a_killed_server_is_noticed_though_a_fork_of_it_lives() -> None:
    with start_server("fork") as process:
        assert process.stdout is not None
        store = connect(LOOPBACK, int(process.stdout.readline()), 10, secret=SECRET)
        assert "belongs to the process that this one was forked from" in process.stdout.readline()
        process.kill()
        with pytest.raises(StoreLost):
            store.wait(["never"], 50)


RANK = """
import sys, torch, torch.distributed as dist, rankwise as rw
from datetime import timedelta
from rankwise.session import current
torch.set_num_threads(1)
rank, port, num_phases, num_steps = map(int, sys.argv[1:])
with rw.join(init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=3, timeout_seconds=30) as world:
    store = current().store
    torch.manual_seed(rank)
    model = rw.replicate(torch.nn.Linear(3, 1, dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for phase in range(num_phases):
        store.wait([f"go/{phase}"], 30)
        for step in range(num_steps):
            x = torch.arange(3, dtype=torch.float64)[None] + rank + step
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        # Each of these needs the store while it is under attack.
        group = dist.new_group()
        dist.barrier(group=group)
        objects = [None] * 3
        dist.all_gather_object(objects, rank, group=group)
        assert objects == [0, 1, 2], objects
        dist.monitored_barrier(timeout=timedelta(seconds=30))
        store.set(f"done/{phase}/{rank}", repr(model.weight.tolist()))
    store.wait(["end"], 30)
"""


def garbage(port: int) -> list[socket.socket]:
    found = []
    for words in (b"\xff" * 5000, b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\0" * 100, b"\xff\xff\xff\xff", b"\0"):
        stranger = socket.create_connection((LOOPBACK, port), 10)
        stranger.sendall(words)
        found.append(stranger)
    return found


def forged(port: int) -> list[socket.socket]:
    """Frames as a rank sends them, but for the secret."""
    found = []
    for secret in (b"", b"another"):
        stranger, nonce = greet(port)
        own = new_nonce()
        send_frame(stranger, hello(own, "store"))
        send_frame(stranger, proof(secret, b"client", "store", Nonces(client=own, server=nonce)))
        send_frame(stranger, pack_fields([b"set", b"attempt/0/rankwise/kept", b"broken"]))
        assert receive_frame(stranger, HANDSHAKE_FRAME_BYTES) == bytes([Answer.REFUSED])
        found.append(stranger)
    return found


def torchs_own(port: int) -> list[socket.socket]:
    # With torch's store on the other side this client may read, overwrite and delete every key.
    with pytest.raises(RuntimeError):
        dist.TCPStore(LOOPBACK, port, None, False, timeout=timedelta(seconds=1), wait_for_workers=False)
    return []


def idle(port: int) -> list[socket.socket]:
    return [socket.create_connection((LOOPBACK, port), 10) for _ in range(1000)]


def nobody(port: int) -> list[socket.socket]:
    return []


ATTACKS = (nobody, garbage, forged, torchs_own, idle)


def expected_weights() -> list[str]:
    """Train in one process what three ranks train together; return the weights after each phase."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weights = []
    for _ in ATTACKS:
        for step in range(NUM_STEPS):
            x = torch.arange(3, dtype=torch.float64)[None] + torch.arange(3)[:, None] + step
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append(model.weight.detach().clone())
    return weights


def test_strangers_neither_alter_nor_stop_a_job() -> None:
    with listen(LOOPBACK, 0) as listener:
        port = listener.getsockname()[1]
    variables = {**os.environ, "RANKWISE_SECRET": SECRET.decode()}
    command = [sys.executable, "-W", "error", "-c", RANK]
    with ExitStack() as ended:
        ranks = [
            ended.enter_context(
                subprocess.Popen(
                    [*command, *map(str, (rank, port, len(ATTACKS), NUM_STEPS))],
                    env=variables,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            for rank in range(3)
        ]
        for process in ranks:
            ended.callback(process.kill)
        store = connect(LOOPBACK, port, 50, secret=SECRET).prefixed("attempt/0")
        store.set("rankwise/kept", "whole")
        for phase, attack in enumerate(ATTACKS):
            strangers = [ended.enter_context(stranger) for stranger in attack(port)]
            store.set(f"go/{phase}", "")
            for rank in range(3):
                weight = torch.tensor(json.loads(store.get(f"done/{phase}/{rank}", 30)), dtype=torch.float64)
                torch.testing.assert_close(weight, expected_weights()[phase], rtol=1e-10, atol=1e-10)
            # Who comes in the middle of it is let in, and the server has not run out of anything.
            connect(LOOPBACK, port, 30, secret=SECRET).set("seen", "")
            assert len(list(Path(f"/proc/{ranks[0].pid}/fd").iterdir())) < MOST_STRANGERS + 100
            assert store.get("rankwise/kept", 1) == b"whole"
            for stranger in strangers:
                stranger.close()
        store.set("end", "")
        for process in ranks:
            _, err = process.communicate()
            assert process.returncode == 0, err
            assert "Traceback" not in err
            assert SECRET.decode() not in err
