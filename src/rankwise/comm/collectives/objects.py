# SPDX-License-Identifier: Apache-2.0
"""Collectives of objects, as signed pickles, and barriers.

Unpickling runs code, so nothing is unpickled that a rank of the job has not signed: Gloo and NCCL do not authenticate
the process at the other end of a connection. The key is drawn when the ranks join and passes through the job's store,
mixed with the job's secret where there is one.
"""

from __future__ import annotations

import hashlib
import hmac
import pickle
import secrets
from collections import Counter
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from rankwise.comm.collectives.group import gather_bytes
from rankwise.comm.session import agreed, current, exchange_of, group_of, rank_in_group, source_in_group
from rankwise.errors import ConfigurationError, NotSigned
from rankwise.store.wire import pack_fields

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.comm.session import Group, Session
    from rankwise.store.client import Store


KEY = "object-key"
DRAWN_BYTES = 32
SIGNATURE_BYTES = 16


def agree_on_key(store: Store, secret: bytes | None) -> bytes:
    """Return the key by which the ranks of one world sign objects. Called by: every rank, when it joins."""
    drawn = store.held_or_set(KEY, secrets.token_hex(DRAWN_BYTES))
    return hmac.digest(secret or b"", drawn, "sha256")


class SignedCall:
    """One call of an object collective, the same on every rank that takes part.

    A signature holds for one sender, one call, and the ranks of that call: what was recorded elsewhere, or before, is
    refused.
    """

    def __init__(self, what: str, ranks: Sequence[int], group: object = 0) -> None:
        """Describe the next call of ``what`` by ``ranks``; ``group`` distinguishes groups of the same ranks."""
        session = current()
        self._key, self._own, self._what = session.object_key, session.world.rank, what
        self._numbers = session.once(_numbers)
        self._channel = f"{what} {group} {list(ranks)}"

    def sign(self, payload: bytes) -> bytes:
        """Return ``payload`` of this rank, with its signature."""
        return payload + self._signature(payload, self._own)

    def load(self, received: bytes, sender: int) -> Any:
        """Return the object that rank ``sender`` of the world has signed, unpickled after its signature was checked.

        Raises:
            NotSigned: it has not signed these bytes for this call. They are not unpickled.
        """
        payload, signature = received[:-SIGNATURE_BYTES], received[-SIGNATURE_BYTES:]
        if not hmac.compare_digest(signature, self._signature(payload, sender)):
            raise NotSigned(
                f"The bytes that arrived as the object of rank {sender} were not signed by it, and were not unpickled.",
                where=str(current().world),
                evidence=f"{self._what}, call {self._numbers[self._channel] + 1}: {len(received)} bytes; another "
                "process may have sent or changed them on the network",
                do="use a network that only the job's machines can reach; docs/security.md",
            )
        return pickle.loads(payload)  # noqa: S301 - signed by a rank of this job

    def end(self) -> None:
        """Count the call: the ranks have exchanged what it sends."""
        self._numbers[self._channel] += 1

    def _signature(self, payload: bytes, sender: int) -> bytes:
        head = pack_fields([self._channel.encode(), b"%d %d" % (sender, self._numbers[self._channel])])
        signing = hashlib.blake2b(pack_fields([head]), key=self._key, digest_size=SIGNATURE_BYTES)
        signing.update(payload)
        return signing.digest()


def signed_call(what: str, group: Group | None) -> SignedCall:
    """Return the next call of an object collective of a group."""
    members = group_of(group)
    return SignedCall(what, members.ranks, members.number)


def _numbers(_: Session) -> Counter[str]:
    return Counter()


T = TypeVar("T")


def barrier(*, group: Group | None = None) -> None:
    """Return when every rank has called it.

    Called by: every rank of ``group``, in the same order.

    Args:
        group: default: all ranks.

    Raises:
        PeerFailed, PeerMissing: as :func:`rankwise.all_reduce`; the missing ranks are named.
    """
    agreed("barrier()", group, sends=False)


def _pickled(value: object, call: str) -> bytes:
    try:
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except MemoryError:
        raise
    except Exception as error:
        raise ConfigurationError(
            f"{call} cannot send a {type(value).__name__}: it cannot be pickled.",
            evidence=f"{type(error).__name__}: {error}",
            do="pass numbers, text, arrays, or lists and dicts of them; no lambda, generator, open file or lock",
        ) from error


def all_gather_object(value: T, *, group: Group | None = None) -> list[T]:
    """Collect a picklable object of every rank, in rank order; objects may differ in type and size.

    Called by: every rank of ``group``, in the same order.

    Objects are pickled, and signed: what a rank of this job has not signed is not unpickled.

    Args:
        value: anything that can be pickled.
        group: default: all ranks.

    Raises:
        PeerFailed, PeerMissing: as :func:`rankwise.all_reduce`.
        NotSigned: a process that is not a rank of this job has sent or changed an object.
    """
    payload = _pickled(value, "all_gather_object()")
    call = signed_call("all_gather_object()", group)
    received = gather_bytes(exchange_of(group), call.sign(payload), "all_gather_object()")
    objects = [call.load(one, rank) for one, rank in zip(received, group_of(group).ranks, strict=True)]
    call.end()
    return objects


def broadcast_object(value: T, source: int = 0, *, group: Group | None = None) -> T:
    """Give every rank the picklable object of rank ``source``.

    Called by: every rank of ``group``, in the same order. ``value`` matters on ``source`` only.

    Objects are pickled, and signed: what a rank of this job has not signed is not unpickled.

    Args:
        value: anything that can be pickled.
        source: the rank of the world whose object all receive.
        group: default: all ranks.

    Raises:
        ConfigurationError: rank ``source`` does not exist.
        PeerFailed, PeerMissing: as :func:`rankwise.all_reduce`.
        NotSigned: a process that is not a rank of this job has sent or changed the object.
    """
    source_rank = source_in_group(group, source, "broadcast_object")
    exchange = agreed(f"broadcast_object(source={source})", group)
    is_source = rank_in_group(group) == source_rank
    call = signed_call("broadcast_object()", group)
    payload = call.sign(_pickled(value, "broadcast_object()")) if is_source else b""
    if exchange is None:
        return call.load(payload, source)  # type: ignore[no-any-return]
    size = int(exchange.broadcast(torch.tensor([len(payload)]), source_rank, what="broadcast_object(size)"))
    data = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if is_source else torch.empty(size).byte()
    received = exchange.broadcast(data, source_rank, what="broadcast_object(value)")
    loaded = call.load(received.numpy().tobytes(), source)
    call.end()
    return loaded  # type: ignore[no-any-return]
