# SPDX-License-Identifier: Apache-2.0
"""Private views of shared memory: they show what others write, until this process writes a page itself."""

from __future__ import annotations

import mmap
import os

import pytest
import torch

from rankwise.comm.backends.mapping import Mapping, PrivateView, can_see_writes
from rankwise.health.fork_safety import threads_are_known

PAGE = mmap.PAGESIZE


@pytest.fixture
def memory() -> tuple[torch.Tensor, PrivateView]:
    mapping = Mapping.create(6 * PAGE)
    assert mapping.private is not None
    mapping.settle()
    return mapping.tensor(0, [6 * PAGE], torch.uint8), mapping.private


def test_this_system_tells_which_pages_are_written() -> None:
    assert can_see_writes()


def test_a_page_that_is_written_no_longer_shows_what_others_write(memory: tuple[torch.Tensor, PrivateView]) -> None:
    shared, view = memory
    seen = view.tensor(0, [6 * PAGE], torch.uint8)
    shared[PAGE:] = 1
    assert seen[PAGE:].eq(1).all()
    seen[3 * PAGE + 5] = 7
    shared[PAGE:] = 2
    assert seen[3 * PAGE].item() == 1
    assert seen[3 * PAGE + 5].item() == 7
    assert seen[2 * PAGE].item() == seen[4 * PAGE].item() == 2
    assert shared[3 * PAGE + 5].item() == 2
    view.forget(2 * PAGE, 3 * PAGE)
    assert seen[PAGE:].eq(2).all()


@pytest.mark.parametrize("way", ["in place", "data", "numpy"])
def test_every_way_of_writing_is_seen(memory: tuple[torch.Tensor, PrivateView], way: str) -> None:
    _, view = memory
    part = view.part(PAGE, 4 * PAGE)
    seen = view.tensor(PAGE, [4 * PAGE], torch.uint8)
    assert part.written_pages().tolist() == []
    assert seen.sum().item() == 0
    assert part.written_pages().tolist() == []
    for place in (0, 2 * PAGE + 3):
        if way == "in place":
            seen[place] = 1
        elif way == "data":
            seen.data[place] = 1
        else:
            seen.numpy()[place] = 1
    assert part.written_pages().tolist() == [1, 3]
    assert part.written_pages().tolist() == [1, 3]
    part.forget()
    assert part.written_pages().tolist() == []
    assert seen.sum().item() == 0
    # Its first write after it was forgotten counts too.
    seen[0] = 1
    assert part.written_pages().tolist() == [1]


def test_pages_outside_of_a_part_do_not_count(memory: tuple[torch.Tensor, PrivateView]) -> None:
    _, view = memory
    seen = view.tensor(0, [6 * PAGE], torch.uint8)
    part = view.part(2 * PAGE, PAGE)
    seen[PAGE] = seen[3 * PAGE] = 1
    assert part.written_pages().tolist() == []
    seen[3 * PAGE - 1] = 1
    assert part.written_pages().tolist() == [2]


def test_a_forked_process_looks_at_its_own_pages(memory: tuple[torch.Tensor, PrivateView]) -> None:
    _, view = memory
    seen = view.tensor(0, [6 * PAGE], torch.uint8)
    seen[PAGE] = 1
    assert view.written_pages(0, 6 * PAGE).tolist() == [1]
    with threads_are_known():
        child = os.fork()
    if child == 0:
        seen[4 * PAGE] = 1
        os._exit(0 if view.written_pages(0, 6 * PAGE).tolist() == [1, 4] else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert view.written_pages(0, 6 * PAGE).tolist() == [1]
