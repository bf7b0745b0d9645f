# SPDX-License-Identifier: Apache-2.0
"""The parts of shared memory that are plain values: mappings, marks, layouts, sums in rank order."""

from __future__ import annotations

import resource
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rankwise.comm.backends.engine import SYSCALL_NUMBER, Counters, sleep_while
from rankwise.comm.backends.mapping import PAGE_BYTES, Mapping, rounded_up
from rankwise.comm.backends.protocol import ChannelSize
from rankwise.comm.backends.shared_channel import ChannelLayout, lay_out, weighted_sum_into
from rankwise.comm.backends.shared_memory import ResultMemory
from rankwise.comm.backends.staging import REDUCIBLE, reduce_into

CPU = torch.device("cpu")


def test_memory_written_through_one_mapping_is_read_through_another() -> None:
    first = Mapping.create(2 * PAGE_BYTES)
    second = Mapping.open(first.ticket, 2 * PAGE_BYTES)
    first.tensor(PAGE_BYTES, [2, 3], torch.float64).fill_(2.5)
    assert second.tensor(PAGE_BYTES, [6], torch.float64).tolist() == [2.5] * 6
    first.settle()
    second.settle()


def _names(folder: str) -> set[str]:
    return {entry.name for entry in Path(folder).iterdir()}


def test_a_mapping_has_no_name_and_holds_no_descriptor_once_settled() -> None:
    before = _names("/dev/shm"), _names("/proc/self/fd")  # noqa: S108 - only looked at
    mapping = Mapping.create(PAGE_BYTES)
    mapping.reserve(0, PAGE_BYTES)
    mapping.settle()
    # mmap keeps a descriptor of its own for as long as the memory is used: for the private view too, whose pages are
    # looked up through another one.
    assert len(_names("/proc/self/fd")) <= len(before[1]) + 3
    assert _names("/dev/shm") == before[0]  # noqa: S108 - only looked at


def test_another_file_under_the_same_descriptor_is_refused() -> None:
    one, other = Mapping.create(PAGE_BYTES), Mapping.create(PAGE_BYTES)
    process, _, token = one.ticket.split(":")
    wrong = f"{process}:{other.ticket.split(':')[1]}:{token}"
    with pytest.raises(OSError, match="belongs to another process"):
        Mapping.open(wrong, PAGE_BYTES)
    one.settle()
    other.settle()


def test_memory_that_cannot_be_had_is_an_error() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (PAGE_BYTES, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            Mapping.create(4 * PAGE_BYTES)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_sleeper_wakes_when_the_counter_changes() -> None:
    mapping = Mapping.create(PAGE_BYTES)
    place = mapping.address + 512
    woken: list[float] = []

    def sleep() -> None:
        while mapping.words[64] == 0:
            sleep_while(place, 0, 30.0)
        woken.append(time.monotonic())

    thread = threading.Thread(target=sleep)
    thread.start()
    Counters(mapping, 512, rank=0, num_ranks=1).post(1)
    thread.join(10)
    assert woken
    sleep_while(place, 0, 30.0)  # returns at once: the word is another already
    mapping.settle()


def _word_slept_on(thread: threading.Thread) -> int | None:
    """Return the word of memory that a thread sleeps on in the kernel. Source: proc_pid_syscall(5)."""
    number, *arguments = Path(f"/proc/self/task/{thread.native_id}/syscall").read_text().split()
    return int(arguments[0], 16) if number == str(SYSCALL_NUMBER) else None


@pytest.mark.parametrize("poster", [0, 2], ids=["first", "last"])
def test_posting_wakes_the_process_that_sleeps_on_a_counter(poster: int) -> None:
    """A sleeper that is not woken would continue after its timeout, and everything would be ten times slower."""
    mapping = Mapping.create(PAGE_BYTES)
    counters = [Counters(mapping, 256, rank, 3) for rank in range(3)]
    words = counters[1]._addresses
    for other in {0, 1, 2} - {poster}:
        counters[other].post(1)
    thread = threading.Thread(target=counters[1].sleep_until, args=(1, 3600.0))
    thread.start()
    try:
        # Python's own lock is a word that threads sleep on, too.
        while (word := _word_slept_on(thread)) not in words:
            assert thread.is_alive(), "it returned before anything was posted"
        assert word == words[poster]
        counters[poster].post(1)
        thread.join(10)
        assert not thread.is_alive()
    finally:
        for counter in counters:
            counter.post(1)
        thread.join(10)
        mapping.settle()


def test_counters_show_which_rank_is_behind() -> None:
    mapping = Mapping.create(PAGE_BYTES)
    counters = [Counters(mapping, 256, rank, 3) for rank in range(3)]
    counters[0].post(2)
    counters[2].post(1)
    assert not counters[0].reach(1)
    assert counters[0].last(1) == 1
    counters[1].post(1)
    assert counters[0].reach(1)
    assert counters[0].last(1) is None
    assert counters[1].last(2) == 2
    counters[0].sleep_until(1, 30.0)  # nobody is behind: returns at once
    mapping.settle()


@given(
    sizes=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 200)), min_size=1, max_size=8),
    num_ranks=st.integers(1, 9),
    slices=st.one_of(st.none(), st.integers(1, 9)),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)
@settings(max_examples=200, deadline=None)
def test_parts_of_lanes_overlap_only_where_it_is_known(
    *, sizes: list[tuple[int, int]], num_ranks: int, slices: int | None, dtype: torch.dtype
) -> None:
    num_slices = None if slices is None else min(slices, num_ranks)
    layouts = [ChannelLayout(ChannelSize(numel, flags, dtype, CPU), num_ranks, num_slices) for numel, flags in sizes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rankwise.comm.backends.shared_channel.ARENA_BYTES", 4096)
        arenas, arena_bytes = lay_out(layouts, PAGE_BYTES)
    end = PAGE_BYTES
    for layout, (numel, flags) in zip(layouts, sizes, strict=True):
        control = [(layout.counters(number), 64 * num_ranks) for number in range(3)]
        control += [(layout.header(rank), 24 + flags) for rank in range(num_ranks)]
        control += [(layout.tail, 8 * (1 + flags))]
        end = _one_after_the_other(control, end)
        for rank in range(num_ranks):
            own = [(layout.body(rank), numel * dtype.itemsize)]
            assert _one_after_the_other(own, arenas + rank * arena_bytes) <= arenas + (rank + 1) * arena_bytes
        for other in layouts:
            used = [range(one.body(0), one.body(0) + one.body_bytes) for one in (layout, other)]
            shared = range(max(used[0].start, used[1].start), min(used[0].stop, used[1].stop))
            assert layout.overlaps(other) == (bool(shared) or other is layout)
        bounds = [layout.bounds(slice_) for slice_ in range(layout.num_slices)]
        if bounds:
            assert (bounds[0][0], bounds[-1][1]) == (0, numel)
            assert all(left[1] == right[0] for left, right in pairwise(bounds))
    assert end <= arenas


def _one_after_the_other(parts: list[tuple[int, int]], start: int) -> int:
    """Return the end of the last of ``parts``, each of which starts on a line of its own behind the one before."""
    for place, num_bytes in parts:
        assert place >= start
        assert place % 64 == 0
        start = place + num_bytes
    return start


def test_memory_of_a_large_result_is_reused_after_its_tensor_is_deleted() -> None:
    results = ResultMemory()
    like = torch.empty(0, dtype=torch.float32)
    first = results.empty((2**20,), like)
    place = first.data_ptr()
    first.fill_(1.0)
    part = first[5:7]
    del first
    second = results.empty((2**10, 2**10), like)
    assert second.data_ptr() != place, "a view still looks at it"
    second.fill_(2.0)
    assert part.tolist() == [1.0, 1.0]
    del part
    third = results.empty((2**20,), like)
    assert third.data_ptr() == place
    assert second.unique().tolist() == [2.0]


def test_idle_memory_stays_within_its_limit() -> None:
    results = ResultMemory()
    like = torch.empty(0, dtype=torch.uint8)
    for num_bytes in (2**20, 2**21, 2**22, 2**28):
        results.empty((num_bytes,), like)
    assert [len(kept) for kept in results._kept] == [2**21, 2**22]


def test_sums_are_taken_in_rank_order() -> None:
    parts = [torch.tensor([1e16]), torch.tensor([1.0]), torch.tensor([-1e16])]
    parts = [part.double() for part in parts]
    out = torch.empty(1, dtype=torch.float64)
    reduce_into(out, parts, "sum")
    assert out.item() == (1e16 + 1.0) - 1e16 == 0.0
    weighted_sum_into(out, parts, [1.0, 1.0, 1.0])
    assert out.item() == 0.0
    weighted_sum_into(out, parts, [0.5, 1.0, 0.5])
    assert out.item() == (0.5e16 + 1.0) - 0.5e16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    parts = [torch.full((300_000,), value, dtype=dtype) for value in (256.0, 0.5, 0.5, 0.5, 0.5)]
    out = torch.empty(300_000, dtype=dtype)
    reduce_into(out, parts, "sum")
    assert out.unique().tolist() == [258.0]
    weighted_sum_into(out, parts, [1.0] * 5)
    assert out.unique().tolist() == [258.0]
    weighted_sum_into(out, parts[:2], [0.25, 4.0])
    assert out.unique().tolist() == [66.0]


def test_samples_without_weight_do_not_count() -> None:
    parts = [torch.tensor([float("nan"), 1.0]), torch.tensor([2.0, 4.0])]
    out = torch.empty(2)
    weighted_sum_into(out, parts, [0.0, 0.5])
    assert out.tolist() == [1.0, 2.0]
    weighted_sum_into(out, parts, [0.0, 0.0])
    assert out.tolist() == [0.0, 0.0]


def test_values_that_cannot_be_reduced_are_recognized() -> None:
    assert torch.bfloat16 in REDUCIBLE["max"]
    assert torch.complex64 in REDUCIBLE["sum"]
    assert torch.complex64 not in REDUCIBLE["max"]
    assert torch.int16 not in REDUCIBLE["sum"]


def test_rounding_up() -> None:
    assert [rounded_up(n, 64) for n in (0, 1, 64, 65)] == [0, 64, 64, 128]
