# SPDX-License-Identifier: Apache-2.0
"""Objects of other ranks are unpickled only if the rank has signed them, for this call."""

from __future__ import annotations

import os
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch

import rankwise as rw
import rankwise.compat.horovod as hvd
from rankwise import testing
from rankwise.comm.collectives.group import gather_bytes
from rankwise.comm.collectives.objects import SIGNATURE_BYTES, SignedCall, agree_on_key, signed_call
from rankwise.comm.session import current
from rankwise.errors import ConfigurationError, NotSigned
from rankwise.store.opening import serve

if TYPE_CHECKING:
    from pathlib import Path

    from rankwise.world.facts import World

CALL = "all_gather_object()"


class Evil:
    """Runs code where it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (self.path,))


def _refused(call: Any, *args: object) -> str:
    try:
        call(*args)
    except NotSigned as error:
        return str(error)
    return ""


def _signed_with(key: bytes, payload: bytes, call: SignedCall) -> bytes:
    known, call._key = call._key, key
    try:
        return call.sign(payload)
    finally:
        call._key = known


def _forged_gather(world: World, path: str) -> str:
    if world.rank == 0:
        return _refused(rw.all_gather_object, "mine")
    payload = pickle.dumps(Evil(path))
    gather_bytes(current().exchange, _signed_with(b"a guess", payload, signed_call(CALL, None)), CALL)
    return ""


def _forged_broadcast(world: World, path: str) -> str:
    if world.rank == 0:
        return _refused(rw.broadcast_object, None, 1)
    exchange = current().exchange
    assert exchange is not None
    payload = torch.frombuffer(bytearray(pickle.dumps(Evil(path)) + b"0" * SIGNATURE_BYTES), dtype=torch.uint8)
    exchange.agree("broadcast_object(source=1)")
    exchange.broadcast(torch.tensor([payload.numel()]), 1, what="broadcast_object(size)")
    exchange.broadcast(payload, 1, what="broadcast_object(value)")
    return ""


def _forged_for_horovod(world: World, path: str) -> str:
    hvd.init()
    if world.rank == 0:
        return _refused(hvd.broadcast_object, None, 1)
    payload = torch.frombuffer(bytearray(pickle.dumps(Evil(path))), dtype=torch.uint8)
    hvd.broadcast(torch.tensor([payload.numel()]), 1, "broadcast_object.sz")
    hvd.broadcast(payload, 1, "broadcast_object.t")
    return ""


def _forged_for_horovod_by_gather(world: World, path: str) -> str:
    hvd.init()
    if world.rank == 0:
        return _refused(hvd.allgather_object, "mine")
    payload = torch.frombuffer(bytearray(pickle.dumps(Evil(path))), dtype=torch.uint8)
    hvd.allgather(torch.tensor([payload.numel()]), name="allgather_object.sz")
    hvd.allgather(payload, name="allgather_object.t")
    return ""


@pytest.mark.parametrize(
    "forge", [_forged_gather, _forged_broadcast, _forged_for_horovod, _forged_for_horovod_by_gather]
)
def test_an_object_of_a_process_without_the_key_is_not_unpickled(forge: Any, tmp_path: Path) -> None:
    path = tmp_path / "ran"
    message = testing.run_ranks(forge, 2, str(path))[0].get()
    assert "The bytes that arrived as the object of rank 1 were not signed by it, and were not unpickled." in message
    assert not path.exists()


def _recorded(world: World) -> list[str]:
    """Send again what was signed before, or for something else, as a process that can only record could."""
    group = rw.new_group([0, 1])
    other = rw.new_group([0, 1])
    signed = {
        "earlier": signed_call(CALL, None).sign(pickle.dumps(1)),
        "another group": signed_call(CALL, group).sign(pickle.dumps(1)),
        "another collective": signed_call("broadcast_object()", None).sign(pickle.dumps(1)),
        "horovod": SignedCall("hvd: allgather_object", range(2)).sign(pickle.dumps(1)),
    }
    assert rw.all_gather_object(world.rank) == [0, 1]
    found = []
    for group_called, data in [(None, one) for one in signed.values()] + [(other, signed["another group"])]:
        if world.rank == 0:
            found.append(_refused(lambda at=group_called: rw.all_gather_object(0, group=at)))
        else:
            gather_bytes(current().exchange if group_called is None else group_called._exchange, data, CALL)
    # As its own, what rank 0 sends.
    if world.rank == 0:
        found.append(_refused(rw.broadcast_object, None, 1))
        return found
    exchange = current().exchange
    assert exchange is not None
    of_zero = SignedCall("broadcast_object()", range(2))
    of_zero._own = 0
    data = torch.frombuffer(bytearray(of_zero.sign(pickle.dumps(1))), dtype=torch.uint8)
    exchange.agree("broadcast_object(source=1)")
    exchange.broadcast(torch.tensor([data.numel()]), 1, what="broadcast_object(size)")
    exchange.broadcast(data, 1, what="broadcast_object(value)")
    return found


def test_a_recorded_object_is_refused_elsewhere() -> None:
    messages = testing.run_ranks(_recorded, 2)[0].get()
    assert len(messages) == 6
    assert all("were not signed by it" in message for message in messages), messages


def _continues(world: World) -> list[Any]:
    group = rw.new_group([1, 2])
    results: list[Any] = []
    for number in range(3):
        results.append(rw.all_gather_object(("x" * 300 * number, world.rank)))
        results.append(rw.broadcast_object(number if world.rank == 1 else None, source=1))
        if group.rank is not None:
            results.append(rw.all_gather_object(world.rank, group=group))
            results.append(rw.broadcast_object(world.rank, source=2, group=group))
    with pytest.raises(ConfigurationError, match="cannot be pickled"):
        rw.all_gather_object(lambda: None)
    results.append(rw.all_gather_object(world.rank))
    return results


@pytest.mark.parametrize("exchange", ["shared_memory", "gloo"])
def test_signed_objects_arrive_call_after_call(exchange: str) -> None:
    for rank, result in enumerate(testing.run_ranks(_continues, 3, exchange=exchange)):
        expected: list[Any] = []
        for number in range(3):
            expected += [[("x" * 300 * number, other) for other in range(3)], number]
            expected += [[1, 2], 2] if rank else []
        assert result.get() == [*expected, [0, 1, 2]]


def test_the_key_depends_on_the_secret_and_is_drawn_for_each_world() -> None:
    store, _ = serve(secret=b"of this test")
    first = agree_on_key(store.prefixed("a"), b"one")
    assert agree_on_key(store.prefixed("a"), b"one") == first
    others = [agree_on_key(store.prefixed("a"), b"two"), agree_on_key(store.prefixed("b"), b"one")]
    assert len({first, *others, agree_on_key(store.prefixed("a"), None)}) == 4
    store.close()
