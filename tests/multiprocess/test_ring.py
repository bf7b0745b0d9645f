# SPDX-License-Identifier: Apache-2.0
"""Tensors that one rank of a host sends another through a ring in shared memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rankwise.comm.backends.mapping import PAGE_BYTES
from rankwise.comm.backends.ring import RingReceiver, RingSender, ring_bytes
from rankwise.comm.backends.shared_memory import SharedMemory
from rankwise.comm.session import current
from rankwise.errors import PeerMissing
from rankwise.testing import RankDied, kill_self, run_ranks

if TYPE_CHECKING:
    from rankwise.world.facts import World

CAPACITY = 4 * PAGE_BYTES
SIZES = (
    1, PAGE_BYTES, CAPACITY, 3, CAPACITY - 1, 2 * PAGE_BYTES + 5, 0, 64, CAPACITY // 2, CAPACITY // 2 + 1, 7,
    3 * CAPACITY + 5,
)  # fmt: skip


def _ends(world: World) -> tuple[RingSender, RingReceiver]:
    """Return this rank's ends of a ring in each direction. Called by: both ranks."""
    exchange, other = current().exchange, 1 - world.rank
    assert isinstance(exchange, SharedMemory)
    memory, _ = exchange.host_memory(PAGE_BYTES + 2 * ring_bytes(CAPACITY), [])
    assert memory is not None
    own, others = (PAGE_BYTES + rank * ring_bytes(CAPACITY) for rank in (world.rank, other))
    return RingSender(memory, own, CAPACITY, peer=other), RingReceiver(memory, others, CAPACITY, peer=other)


def _tensors(rank: int, turn: int) -> list[torch.Tensor]:
    drawn = torch.Generator().manual_seed(10 * turn + rank)
    return [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=drawn) for size in SIZES]


def _swap(world: World) -> bool:
    """Both ranks send more than fits before either receives, and wait for what they receive in groups."""
    sender, receiver = _ends(world)
    ticket = current().exchange.detector.ticket("tensors in a ring")  # type: ignore[union-attr]
    are_equal = []
    for turn in range(5):
        for tensor in _tensors(world.rank, turn):
            sender.send(tensor)
        places = [torch.zeros(size, dtype=torch.uint8) for size in SIZES]
        numbers = [receiver.receive(place) for place in places]
        receiver.wait(numbers[turn], ticket)
        receiver.wait(numbers[-1], ticket)
        sender.finish(ticket)
        expected = _tensors(1 - world.rank, turn)
        are_equal += [torch.equal(place, one) for place, one in zip(places, expected, strict=True)]
    return all(are_equal)


def test_tensors_arrive_in_order_also_where_more_is_sent_than_fits() -> None:
    assert [result.get() for result in run_ranks(_swap, 2)] == [True, True]


def _wait_for_one_that_dies(world: World) -> None:
    sender, receiver = _ends(world)
    if world.rank == 1:
        kill_self()
    ticket = current().exchange.detector.ticket("tensors in a ring")  # type: ignore[union-attr]
    for _ in range(2):
        sender.send(torch.zeros(CAPACITY, dtype=torch.uint8))
    try:
        receiver.wait(receiver.receive(torch.zeros(1)), ticket)
    except PeerMissing:
        sender.finish(ticket)


def test_a_rank_that_dies_is_named_by_the_one_that_waits_to_receive_or_to_send() -> None:
    waiting, dead = run_ranks(_wait_for_one_that_dies, 2)
    assert isinstance(dead.error, RankDied)
    assert isinstance(waiting.error, PeerMissing)
    assert "rank 1 exited" in str(waiting.error)
