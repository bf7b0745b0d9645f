# SPDX-License-Identifier: Apache-2.0
"""A store that torch's own client uses, and that only processes of this user reach."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist

from rankwise.store.torch_protocol import MAGIC, Query, serve_this_user
from rankwise.world import network

if TYPE_CHECKING:
    from collections.abc import Generator

LOOPBACK = "127.0.0.1"
NOBODY = 65534
ASK = """
import socket, struct, sys
port, magic, validate, ping = map(int, sys.argv[1:])
with socket.create_connection(("127.0.0.1", port), 10) as asking:
    try:
        asking.sendall(struct.pack("=BI", validate, magic) + struct.pack("=BI", ping, 7))
        print(asking.recv(4).hex())
    except OSError:
        print("")
"""


@contextmanager
def served() -> Generator[int]:
    server = serve_this_user(LOOPBACK)
    try:
        yield server.port
    finally:
        server.close()


def client(port: int, host: str = LOOPBACK) -> dist.TCPStore:
    return dist.TCPStore(host, port, None, False, timeout=timedelta(seconds=20), wait_for_workers=False)


def asked(port: int, *before: str) -> str:
    """Return the answer to a ping by another process, empty if the connection was closed."""
    words = [*before, sys.executable, "-c", ASK, *map(str, (port, MAGIC, int(Query.VALIDATE), int(Query.PING)))]
    return subprocess.run(words, capture_output=True, text=True, timeout=50, check=True).stdout.strip()


@pytest.mark.parametrize("host", [LOOPBACK, "localhost", "::ffff:127.0.0.1"])
def test_torchs_client_uses_it_as_torchs_own(host: str) -> None:
    with served() as port:
        store, other = client(port, host), client(port)
        store.set("key", "value")
        assert other.get("key") == b"value"
        assert other.compare_set("key", "value", "other") == b"other"
        assert other.compare_set("new", "expected", "value") == b"expected"
        assert not store.check(["new"])
        assert store.check(["key"])
        store.append("key", "!")  # pyright: ignore[reportAttributeAccessIssue] - newer than torch's stub
        store.multi_set(["a", "b"], ["1", "2" * 5000])  # pyright: ignore[reportAttributeAccessIssue]
        assert other.multi_get(["key", "a", "b"]) == [b"other!", b"1", b"2" * 5000]
        assert (store.add("n", 3), other.add("n", -5), store.num_keys()) == (3, -2, 4)
        assert (store.delete_key("a"), store.delete_key("a"), store.num_keys()) == (True, False, 3)
        store.set_timeout(timedelta(seconds=0.1))
        with pytest.raises(dist.DistStoreError, match="timeout"):
            store.get("absent")
        other.set("absent", "now")
        assert store.get("absent") == b"now"


def test_a_wait_ends_when_another_client_sets_the_key() -> None:
    with served() as port:
        store = client(port)
        words = [sys.executable, "-c", ASK_TO_WAIT, str(port)]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as waiting:
            store.wait(["waits"])
            store.set("key", "value")
            assert waiting.communicate(timeout=50)[0] == "b'value'\n"


ASK_TO_WAIT = """
import sys, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), None, False, wait_for_workers=False)
store.set("waits", "")
print(store.get("key"))
"""


@pytest.mark.parametrize(
    "sent",
    [
        b"\xff" * 100,
        struct.pack("=BI", Query.VALIDATE, MAGIC + 1),
        struct.pack("=BIBq", Query.VALIDATE, MAGIC, Query.SET, 2**62),
        struct.pack("=BIBq", Query.VALIDATE, MAGIC, Query.GET, 1) + b"a",
    ],
)
def test_a_bad_request_ends_its_connection_only(sent: bytes) -> None:
    with served() as port:
        store = client(port)
        with socket.create_connection((LOOPBACK, port), 10) as bad:
            bad.sendall(sent)
            with suppress(ConnectionResetError):
                assert bad.recv(1) == b""
        store.set("key", "value")
        assert store.get("key") == b"value"


def test_the_owner_of_a_connection_is_the_user_at_its_other_end() -> None:
    for host in ("127.0.0.1", "::1"):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, 0), family=family) as listener:
            asking = socket.create_connection(listener.getsockname()[:2], 10)
            accepted, _ = listener.accept()
            with accepted:
                assert network.user_of_peer(accepted) == os.geteuid()
                asking.close()
                # Whose it was is no longer known, and must not be taken for root's.
                assert network.user_of_peer(accepted) is None


def test_a_process_of_another_user_gets_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with served() as port:
        assert asked(port) == struct.pack("=I", 7).hex()
        monkeypatch.setattr(os, "geteuid", lambda: NOBODY)
        assert asked(port) == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to start a process of another user")
def test_a_stranger_with_an_account_gets_no_answer() -> None:
    with served() as port:
        assert asked(port, "setpriv", f"--reuid={NOBODY}", "--clear-groups") == ""
        assert asked(port) == struct.pack("=I", 7).hex()
