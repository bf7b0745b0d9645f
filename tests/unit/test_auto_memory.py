# SPDX-License-Identifier: Apache-2.0
"""Memory that two processes share: tensors in it have the values, shapes and strides that they were given."""

from __future__ import annotations

import gc
import multiprocessing
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from rankwise.auto.connection import SharedBytes, dense_strides, lay_out

if TYPE_CHECKING:
    from rankwise.auto.connection import Place, Ticket

TENSORS = [
    torch.arange(6.0).view(2, 3),
    torch.tensor(7),
    torch.empty(0, 4),
    torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    torch.randn(4, 6, dtype=torch.complex64)[::2, 1:5].T,
    torch.tensor([True, False, True]),
    torch.randn(3, 5, dtype=torch.bfloat16).T,
    torch.randn(4, 1).expand(4, 3),
]


def test_places_do_not_overlap_and_keep_the_order_of_dims() -> None:
    places, num_bytes = lay_out(TENSORS)
    memory = SharedBytes(num_bytes)
    for place, one in zip(places, TENSORS, strict=True):
        memory.at(place).copy_(one)
    for (start, shape, strides, dtype), one in zip(places, TENSORS, strict=True):
        found = memory.at((start, shape, strides, dtype))
        assert torch.equal(found, one)
        assert found.stride() == strides == dense_strides(one)
        assert found.dtype is one.dtype
        assert start % 64 == 0
    assert dense_strides(TENSORS[3]) == TENSORS[3].stride()


def test_a_tensor_without_gaps_keeps_its_strides() -> None:
    assert dense_strides(torch.empty(2, 3, 4)) == (12, 4, 1)
    assert dense_strides(torch.empty(2, 3, 4).permute(2, 0, 1)) == (1, 12, 4)
    assert dense_strides(torch.empty(6, 8)[::2, :4]) == (4, 1)
    assert dense_strides(torch.empty(())) == ()
    assert dense_strides(torch.empty(0, 3)) == (3, 1)


def _add_one(ticket: Ticket, places: list[Place]) -> None:
    memory = SharedBytes(0, ticket)
    for place in places:
        one = memory.at(place)
        one.copy_(one.logical_not() if one.dtype is torch.bool else one + 1)


def test_what_another_process_writes_is_seen() -> None:
    places, num_bytes = lay_out(TENSORS)
    memory = SharedBytes(num_bytes)
    for place, one in zip(places, TENSORS, strict=True):
        memory.at(place).copy_(one)
    process = multiprocessing.get_context("forkserver").Process(target=_add_one, args=(memory.ticket, places))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    for place, one in zip(places, TENSORS, strict=True):
        assert torch.equal(memory.at(place), one.logical_not() if one.dtype is torch.bool else one + 1)


def _num_open() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_other_memory_behind_a_ticket_is_not_opened() -> None:
    memory, other = SharedBytes(8), SharedBytes(8)
    before = _num_open()
    process, descriptor, num_bytes, _ = memory.ticket
    with pytest.raises(OSError, match="is other memory"):
        SharedBytes(0, (process, descriptor, num_bytes, other.ticket[3]))
    assert _num_open() == before
    memory.close()
    with pytest.raises(OSError, match="No such file"):
        SharedBytes(0, memory.ticket)


def test_a_tensor_outlives_the_memory_it_lies_in() -> None:
    memory = SharedBytes(16)
    one = memory.at((0, (2,), (1,), torch.float64)).fill_(3.0)
    descriptor = memory.ticket[1]
    memory.close()
    del memory
    gc.collect()
    assert one.tolist() == [3.0, 3.0]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_memory_that_there_is_not_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def has_no_room(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", has_no_room)
    before = _num_open()
    with pytest.raises(OSError, match="No space"):
        SharedBytes(64)
    assert _num_open() == before
