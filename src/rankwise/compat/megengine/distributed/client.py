# SPDX-License-Identifier: Apache-2.0
"""Values that ranks share by name, in the job's store."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import torch

from rankwise.comm import collectives
from rankwise.comm.point_to_point.message import pack, unpack
from rankwise.comm.session import Session, current
from rankwise.errors import ConfigurationError, PeerMissing
from rankwise.store.wire import pack_fields, unpack_fields

if TYPE_CHECKING:
    from rankwise.store.client import Store

PREFIX = "megengine/user"
SLICE_SECONDS = 0.2
"""The interval at which a waiting rank checks whether another has failed."""


class Client:
    """Sets and gets values that all ranks share."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._alone: dict[str, bytes] = {}

    def user_set(self, key: str, val: object) -> bool:
        """Set the value of ``key``.

        Args:
            key: any string.
            val: tensor, NumPy array, number, string, ``None``, ``tensor.shape`` or ``tensor.dtype``, or a list, tuple
                or dict of them. Nothing is pickled.

        Raises:
            ConfigurationError: ``key`` is not a string, or ``val`` contains something else.
        """
        content = _bytes_of(val)
        store = self._store(key)
        if store is None:
            self._alone[key] = content
        else:
            store.set(key, content)
        return True

    def user_get(self, key: str) -> Any:
        """Return the value of ``key``, once a rank has set it. Tensors are on the CPU.

        Raises:
            PeerMissing: no rank set it within ``join(timeout_seconds=...)``.
            PeerFailed: a rank failed meanwhile.
        """
        return _value_of(self._content(key))

    def user_pop(self, key: str) -> Any:
        """Return the value of ``key``, as :meth:`user_get` does, and remove it.

        Called by: one rank for each ``user_set``.
        """
        value = self.user_get(key)
        store = self._store(key)
        if store is None:
            self._alone.pop(key, None)
        else:
            store.delete(key)
        return value

    def group_barrier(self, key: str, size: int) -> None:
        """Return when every rank of a group has called it.

        Called by: every rank of the group.

        Args:
            key: of the group: ``group.key``.
            size: the number of its ranks.

        Raises:
            ConfigurationError: it is not the group of all ranks; other groups cannot be found by their key.
        """
        world_size = self._session.world.world_size
        if size != world_size or key != ",".join(map(str, range(world_size))):
            raise ConfigurationError(
                f"wait_for does not accept the ranks {key} as a key.", do="use dist.group_barrier(group)"
            )
        collectives.barrier()

    def _content(self, key: str) -> bytes:
        store, detector = self._store(key), self._session.detector
        if store is None or detector is None:
            if key not in self._alone:
                raise self._timed_out(key, 0.0)
            return self._alone[key]
        end = time.monotonic() + detector.timeout_seconds
        while True:
            try:
                return store.get(key, SLICE_SECONDS)
            except TimeoutError:
                if detector.error is not None:
                    raise detector.error from None
                if time.monotonic() > end:
                    raise self._timed_out(key, detector.timeout_seconds) from None

    def _timed_out(self, key: str, waited: float) -> PeerMissing:
        world = self._session.world
        others = [rank for rank in range(world.world_size) if rank != world.rank]
        return PeerMissing(
            f"user_get({key!r}) timed out after {waited:.0f} s: no rank has set it.",
            ranks=others,
            where=str(world),
            do=f"call dist.get_client().user_set({key!r}, ...) on one rank first; user_pop() removes the value",
        )

    def _store(self, key: object) -> Store | None:
        if current() is not self._session:
            raise ConfigurationError(
                "This client belongs to a world that has been left.", do="call dist.get_client() again"
            )
        if not isinstance(key, str) or not key:
            raise ConfigurationError(f"A key must be a str, not {key!r}.", do="pass str(key)")
        return None if self._session.store is None else self._session.store.prefixed(PREFIX)


def get_client() -> Client:
    """Return the client that sets and gets values shared by all ranks.

    Raises:
        NotJoined: no world has been joined.
    """
    return current().once(Client)


def _bytes_of(value: object) -> bytes:
    try:
        with torch.no_grad():
            packed = pack(value)
    except ConfigurationError as error:
        raise ConfigurationError(
            error.what.replace("send cannot send", "user_set cannot set"),
            do="pass tensors, NumPy arrays, numbers and strings, in lists, tuples and dicts; use "
            "rankwise.broadcast_object() for other objects",
        ) from None
    return pack_fields([json.dumps(packed.tree).encode(), *map(bytes, packed.buffers)])


def _value_of(content: bytes) -> Any:
    head, *parts = unpack_fields(content)
    buffers = [
        torch.frombuffer(bytearray(part), dtype=torch.uint8) if part else torch.empty(0, dtype=torch.uint8)
        for part in parts
    ]
    return unpack(json.loads(head), buffers, torch.device("cpu"))[0]
