# SPDX-License-Identifier: Apache-2.0
"""The job's store without a network: frames, what is signed, keys and values on a loop."""

from __future__ import annotations

import asyncio
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwise.store.keys import REQUEST, SECONDS, GivenUp, Keys
from rankwise.store.wire import (
    HANDSHAKE_FRAME_BYTES,
    FrameTooLong,
    Nonces,
    frame,
    hello,
    is_proof,
    new_nonce,
    pack_fields,
    parse_hello,
    proof,
    read_frame,
    unpack_fields,
)

NONCES = Nonces(client=b"c" * 32, server=b"s" * 32)


@given(st.lists(st.binary(max_size=9), max_size=5))
def test_fields_come_back(fields: list[bytes]) -> None:
    assert unpack_fields(pack_fields(fields)) == fields


@given(st.binary(max_size=40))
def test_fields_are_read_whole_or_not_at_all(data: bytes) -> None:
    try:
        fields = unpack_fields(data)
    except ValueError:
        return
    assert pack_fields(fields) == data


def frame_of(data: bytes, limit: int) -> bytes:
    async def read() -> bytes:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        return await read_frame(reader, limit)

    return asyncio.run(read())


def test_a_frame_ends_where_it_says_and_not_before() -> None:
    assert frame_of(b"\0\0\0\x02abc", 2) == b"ab"
    assert frame_of(b"\0\0\0\0", 2) == b""
    for cut in (b"", b"\0\0", b"\0\0\0\x02a"):
        with pytest.raises(ConnectionError, match="ended"):
            frame_of(cut, 2)
    # The announcement alone is enough to refuse: nothing of that length is read.
    with pytest.raises(FrameTooLong):
        frame_of(b"\xff\xff\xff\xff", 2)


def test_greetings_come_back_and_others_are_none() -> None:
    nonce = new_nonce()
    assert parse_hello(hello(nonce, "agent")) == (nonce, "agent")
    assert len(hello(nonce, "x" * 64)) == HANDSHAKE_FRAME_BYTES
    assert new_nonce() != nonce
    for wrong in (b"", b"HTTP/1.1 400 Bad Request" * 3, hello(nonce)[:-1], hello(nonce) + b"\xff"):
        with pytest.raises(ValueError, match=r"greeting|decode"):
            parse_hello(wrong)


@pytest.mark.parametrize(
    "other",
    [
        (b"another", b"client", "store", NONCES),
        (b"secret", b"server", "store", NONCES),
        (b"secret", b"client", "agent", NONCES),
        (b"secret", b"client", "store", Nonces(client=b"C" * 32, server=NONCES.server)),
        (b"secret", b"client", "store", Nonces(client=NONCES.client, server=b"S" * 32)),
        (b"secret", b"client", "store", Nonces(client=NONCES.server, server=NONCES.client)),
    ],
)
def test_a_proof_holds_for_one_secret_role_purpose_and_handshake(other: tuple) -> None:  # type: ignore[type-arg]
    own = (b"secret", b"client", "store", NONCES)
    assert is_proof(proof(*own), *own)
    assert not is_proof(proof(*other), *own)
    assert not is_proof(b"", *own)


def test_counters() -> None:
    keys = Keys()
    assert (keys.add("n", 2), keys.add("n", -5)) == (2, -3)
    keys.set("text", b"abc")
    with pytest.raises(ValueError, match="text holds b'abc', which is not a number"):
        keys.add("text", 1)
    keys.set("large", str(2**63 - 1).encode())
    with pytest.raises(ValueError, match="64 bits"):
        keys.add("large", 1)
    assert keys.values(["n", "text", "large"]) == [b"-3", b"abc", str(2**63 - 1).encode()]


def test_compare_set_is_torchs() -> None:
    keys = Keys()
    assert keys.compare_set("k", b"x", b"new") == b"x"
    assert not keys.check(["k"])
    assert keys.compare_set("k", b"", b"first") == b"first"
    assert keys.compare_set("k", b"", b"second") == b"first"
    assert keys.compare_set("k", b"first", b"third") == b"third"


def test_keys_go_alone_and_by_prefix() -> None:
    keys = Keys()
    for key in ("a/1", "a/2", "b/1"):
        keys.set(key, b"")
    assert keys.check(["a/1", "b/1"])
    assert not keys.check(["a/1", "c"])
    assert (keys.delete("a/1"), keys.delete("a/1")) == (True, False)
    keys.set("a/1", b"")
    assert keys.delete_prefix("a/") == 2
    assert keys.num_keys() == 1


def test_a_wait_ends_when_the_last_key_is_set_and_leaves_nothing() -> None:
    async def wait() -> Keys:
        keys = Keys()
        waiting = [asyncio.ensure_future(keys.wait(["a", "b"], limit)) for limit in (30, float("inf"))]
        await asyncio.sleep(0)
        keys.set("a", b"")
        await asyncio.sleep(0)
        assert not any(one.done() for one in waiting)
        keys.delete("a")
        keys.set("b", b"")
        await asyncio.sleep(0)
        assert not any(one.done() for one in waiting)
        keys.add("a", 1)
        await asyncio.gather(*waiting)
        return keys

    assert asyncio.run(wait())._waiting == {}


@pytest.mark.parametrize("seconds", [0.0, 0.01, -1.0, float("nan")])
def test_a_wait_that_times_out_leaves_nothing_behind(seconds: float) -> None:
    keys = Keys()
    keys.set("a", b"")
    with pytest.raises(TimeoutError):
        asyncio.run(keys.wait(["a", "b"], seconds))
    assert keys._waiting == {}


def test_a_wait_ends_with_the_connection_that_asked_and_leaves_nothing() -> None:
    """Else a job whose ranks come and go would gather waits for as long as they were to take."""

    async def wait_and_end() -> tuple[BaseException | None, Keys]:
        keys = Keys()
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        answering = asyncio.ensure_future(keys.serve(theirs))
        _, writer = await asyncio.open_connection(sock=ours)
        request = pack_fields([b"get", SECONDS.pack(3600.0), b"never"])
        writer.write(frame(REQUEST.pack(1) + request))
        await writer.drain()
        while not keys._waiting:  # noqa: ASYNC110 - nothing tells that a wait has begun
            await asyncio.sleep(0)
        writer.close()
        await asyncio.wait({answering}, timeout=10.0)
        assert answering.done(), "it waits for somebody who is gone"
        return answering.exception(), keys

    error, keys = asyncio.run(wait_and_end())
    assert error is None
    assert keys._waiting == {}


def test_waits_for_keys_that_will_not_be_set_end_until_the_prefix_is_deleted() -> None:
    async def wait() -> Keys:
        keys = Keys()
        keys.set("a/there", b"1")
        waiting = [asyncio.ensure_future(keys.wait([key], 3600.0)) for key in ("a/1", "b/1")]
        await asyncio.sleep(0)
        keys.give_up("a/", 3, "rank 3 has left")
        await asyncio.wait({waiting[0]}, timeout=10.0)
        error = waiting[0].exception()
        assert isinstance(error, GivenUp)
        assert (error.rank, str(error)) == (3, "rank 3 has left")
        with pytest.raises(GivenUp):
            await keys.wait(["a/2"], 3600.0)
        await keys.wait(["a/there"], 0)
        assert not waiting[1].done()
        # The next world of these ranks may use the same keys.
        keys.delete_prefix("a/")
        waiting.append(asyncio.ensure_future(keys.wait(["a/1"], 3600.0)))
        await asyncio.sleep(0)
        keys.set("a/1", b"")
        keys.set("b/1", b"")
        await asyncio.gather(*waiting[1:])
        return keys

    assert asyncio.run(wait())._waiting == {}
