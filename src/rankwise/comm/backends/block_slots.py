# SPDX-License-Identifier: Apache-2.0
"""Memory in which the ranks of a host gather the parameters of blocks and reduce their gradients.

Each rank writes its part where the others read it, and reads the whole there: nothing is sent. Used by shard.
Legend: L ranks of the host.
"""

from __future__ import annotations

import zlib
from functools import partial
from typing import TYPE_CHECKING
from weakref import ref

import torch

from rankwise.comm.backends.engine import Counters
from rankwise.comm.backends.mapping import LINE_BYTES, PAGE_BYTES, WORD_BYTES, rounded_up
from rankwise.comm.backends.protocol import WHAT_EACH_CALLED, calls_differ
from rankwise.comm.backends.staging import pieces_of, reduce_into
from rankwise.errors import RankwiseError

if TYPE_CHECKING:
    from rankwise.comm.backends.engine import HostMemory
    from rankwise.comm.backends.shared_memory import SharedMemory
    from rankwise.health.flight_recorder import Ticket

NUM_GATHER_SLOTS = 2
"""torch keeps what it gathered for a block until it has gathered the next one."""


class _Rounds:
    """Rounds in which every rank fills its part and reads those of all. The same blocks in the same order on all."""

    def __init__(self, exchange: SharedMemory, memory: HostMemory, start: int) -> None:
        num_ranks = len(memory.ranks)
        self._exchange = exchange
        self._memory = memory
        self._exchange_id = memory.engine.detector.recorder.new_exchange_id(memory.ranks)
        counters_bytes = Counters.num_bytes(num_ranks)
        self._filled = Counters(memory.mapping, start, memory.local_rank, num_ranks)
        self._read = Counters(memory.mapping, start + counters_bytes, memory.local_rank, num_ranks)
        first, length = (start + 2 * counters_bytes) // WORD_BYTES, LINE_BYTES // WORD_BYTES
        self._digests = [first + length * rank for rank in range(num_ranks)]
        self._latest: PendingRound | None = None
        self._round = 0
        """The number of the latest round that this rank has filled."""

    @staticmethod
    def control_bytes(num_ranks: int) -> int:
        """Return how much memory lies before the slots."""
        return rounded_up(2 * Counters.num_bytes(num_ranks) + LINE_BYTES * num_ranks, PAGE_BYTES)

    def _wait_for_readers(self, round_: int) -> None:
        """Wait until the other ranks have read a round and those before it."""
        if self._latest is not None and not self._read.reach(round_):
            engine = self._memory.engine
            engine.wait(engine.start(iter(((self._read, round_),))), self._latest.ticket)

    def _fill(self, what: str, num_bytes: int) -> PendingRound:
        """Show the others that this rank has filled its part of the next round."""
        engine = self._memory.engine
        ticket = engine.detector.ticket(what, self._exchange_id, sent_bytes=num_bytes)
        round_ = self._round + 1
        self._memory.mapping.words[self._digest(self._memory.local_rank, round_)] = _digest_of(ticket)
        self._filled.post(round_)
        self._round = round_
        self._latest = PendingRound(self, round_, ticket)
        return self._latest

    def wait(self, number: int, ticket: Ticket) -> None:
        """Wait until every rank has filled its part of a round. Called by: PendingRound."""
        memory, detector = self._memory, self._memory.engine.detector
        memory.engine.wait(memory.engine.start(iter(((self._filled, number),))), ticket)
        digest = _digest_of(ticket)
        if any(memory.mapping.words[self._digest(rank, number)] != digest for rank in range(len(memory.ranks))):
            raise calls_differ(
                partial(self._exchange.all_gather, what=WHAT_EACH_CALLED),
                ticket.what,
                detector.hostname,
                memory.ranks,
                detector.world_size,
            )

    def _digest(self, rank: int, round_: int) -> int:
        return self._digests[rank] + round_ % NUM_GATHER_SLOTS


class PendingRound:
    """A round that this rank has filled."""

    def __init__(self, rounds: _Rounds, number: int, ticket: Ticket) -> None:
        self.ticket = ticket
        self._rounds = rounds
        self._number = number
        self._is_filled = False

    def wait(self) -> None:
        """Wait until every rank has filled its part. Further calls return at once.

        Raises:
            CollectiveMismatch: another rank is in another block; raised on every rank.
            PeerFailed, PeerMissing: a rank has failed, or does not arrive.
        """
        if not self._is_filled:
            self._rounds.wait(self._number, self.ticket)
            self._is_filled = True


def _digest_of(ticket: Ticket) -> int:
    return zlib.crc32(ticket.what.encode())


class GatherSlots(_Rounds):
    """Two slots in which the parts of all ranks lie next to each other.

    A slot is free again on this rank when no tensor uses its memory any more.
    """

    def __init__(self, exchange: SharedMemory, memory: HostMemory, start: int, slot_bytes: int) -> None:
        super().__init__(exchange, memory, start)
        first = start + self.control_bytes(len(memory.ranks))
        self._slots = [
            memory.mapping.bytes_at(first + slot * slot_bytes, slot_bytes) for slot in range(NUM_GATHER_SLOTS)
        ]
        self._lent: dict[int, tuple[ref[memoryview], ref[torch.Tensor]]] = {}
        """By round, the memory that is in use here, and the tensor that was made of it."""
        self._pending: dict[int, PendingRound] = {}

    @classmethod
    def num_bytes(cls, num_ranks: int, slot_bytes: int) -> int:
        """Return how much memory it takes."""
        return cls.control_bytes(num_ranks) + NUM_GATHER_SLOTS * slot_bytes

    @classmethod
    def own_parts(cls, start: int, slot_bytes: int, rank: int, num_ranks: int) -> list[tuple[int, int]]:
        """Return starts and lengths of the parts that mostly ``rank`` writes."""
        first, length = start + cls.control_bytes(num_ranks), slot_bytes // num_ranks
        return [(first + slot * slot_bytes + rank * length, length) for slot in range(NUM_GATHER_SLOTS)]

    def lend(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Return [num_elements] of memory for the next block, or ``None`` if the slots are too small for it.

        This rank writes its part and calls :meth:`fill`; it reads the whole after :meth:`PendingRound.wait`.
        """
        num_bytes = num_elements * dtype.itemsize
        if num_bytes > len(self._slots[0]):
            return None
        round_ = self._round + 1
        self._free(round_ - NUM_GATHER_SLOTS)
        self._wait_for_readers(round_ - NUM_GATHER_SLOTS)
        memory = self._slots[round_ % NUM_GATHER_SLOTS][:num_bytes]
        tensor = torch.frombuffer(memory, dtype=dtype)
        self._lent[round_] = ref(memory, lambda _: self._note_read(round_)), ref(tensor)
        return tensor

    def is_lent(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is the memory that was lent for the next block."""
        lent = self._lent.get(self._round + 1)
        return lent is not None and lent[1]() is tensor

    def fill(self, what: str, num_bytes: int) -> PendingRound:
        """Show the others that this rank has written its part."""
        pending = self._fill(what, num_bytes)
        self._pending[self._round] = pending
        return pending

    def _free(self, round_: int) -> None:
        """Free a slot that this rank still uses: more blocks are gathered ahead than there are slots."""
        lent = self._lent.get(round_)
        tensor = None if lent is None else lent[1]()
        if tensor is not None:
            self._pending[round_].wait()
            tensor.data = tensor.clone()
            del tensor
        if round_ in self._lent:
            raise RankwiseError(
                "The memory of gathered parameters is still in use.",
                evidence="a tensor that shares memory with an all_gather of fully_shard was kept",
                do='do not keep it, or use rankwise.join(exchange="gloo")',
            )

    def _note_read(self, round_: int) -> None:
        del self._lent[round_]
        self._pending.pop(round_, None)
        self._read.post(min(self._lent, default=self._round + 1) - 1)


class ReduceSlots(_Rounds):
    """A slot of each rank, in which its whole gradients of a block lie while the others read their parts."""

    def __init__(self, exchange: SharedMemory, memory: HostMemory, start: int, slot_bytes: int) -> None:
        super().__init__(exchange, memory, start)
        first = start + self.control_bytes(len(memory.ranks))
        self._places = [first + rank * slot_bytes for rank in range(len(memory.ranks))]
        self._slot_bytes = slot_bytes

    @classmethod
    def num_bytes(cls, num_ranks: int, slot_bytes: int) -> int:
        """Return how much memory it takes."""
        return cls.control_bytes(num_ranks) + num_ranks * slot_bytes

    @classmethod
    def own_parts(cls, start: int, slot_bytes: int, rank: int, num_ranks: int) -> list[tuple[int, int]]:
        """Return starts and lengths of the parts that only ``rank`` writes."""
        return [(start + cls.control_bytes(num_ranks) + rank * slot_bytes, slot_bytes)]

    def lend(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Return [num_elements] of memory for this rank's gradients, or ``None`` if its slot is too small."""
        if num_elements * dtype.itemsize > self._slot_bytes:
            return None
        self._wait_for_readers(self._round)
        return self._memory.mapping.tensor(self._places[self._memory.local_rank], [num_elements], dtype)

    def is_lent(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is this rank's slot."""
        return tensor.data_ptr() == self._memory.mapping.address + self._places[self._memory.local_rank]

    def reduce(self, what: str, out: torch.Tensor, *, averages: bool) -> None:
        """Sum this rank's part of all slots into ``out`` [n], in rank order. Called by: every rank, after :meth:`lend`.

        Raises:
            CollectiveMismatch, PeerFailed, PeerMissing: as :meth:`PendingRound.wait`.
        """
        num_ranks, n = len(self._places), len(out)
        start = self._memory.local_rank * out.nbytes
        parts = [self._memory.mapping.tensor(place + start, [n], out.dtype) for place in self._places]
        pending = self._fill(what, num_ranks * out.nbytes)
        try:
            pending.wait()
            for piece, *others in pieces_of(out, parts):
                reduce_into(piece, others, "sum")
                if averages:
                    piece.div_(num_ranks)
        finally:
            self._read.post(self._round)
