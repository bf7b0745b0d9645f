# SPDX-License-Identifier: Apache-2.0
"""A wait that is too long, and calls that differ: every rank's error, including the line of each rank."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from said import listening
from torch import nn

import rankwise as rw
from rankwise.comm.backends.protocol import ChannelSize
from rankwise.comm.backends.torch_group import TorchGroup
from rankwise.comm.session import current
from rankwise.errors import CollectiveMismatch, PeerMissing
from rankwise.health import collective_timeout, process_probe
from rankwise.health.collective_timeout import CollectiveWait
from rankwise.launch.inspect.stacks import merged_stacks, stacks_as_json, stacks_here
from rankwise.replicate.loss.reports import channel_length

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from on_ranks import RunRanks

    from rankwise.store.client import Store
    from rankwise.world.facts import World

LIMIT_SECONDS = 1.0
NUM_STEPS = 2


def _train(num_steps: int) -> None:
    torch.manual_seed(0)
    model = rw.replicate(nn.Linear(5, 3))
    for _ in range(num_steps):
        model(torch.randn(2, 5)).square().mean().backward()


def _load_images(folder: Path) -> None:
    while not (folder / "go on").exists():
        threading.Event().wait(0.05)


def _hold_the_lock(folder: Path) -> None:
    """Wait in C without giving Python's lock back, as a bug in an extension does."""
    descriptor = os.open(folder / "pipe", os.O_RDWR)
    ctypes.PyDLL(None).read(descriptor, ctypes.create_string_buffer(1), 1)


def _stop(folder: Path) -> None:
    (folder / "process").write_text(str(os.getpid()), encoding="ascii")
    os.kill(os.getpid(), signal.SIGSTOP)


def _let_go_on(folder: Path) -> None:
    """Free the rank that is stuck: nothing else would end it."""
    (folder / "go on").touch()
    descriptor = os.open(folder / "pipe", os.O_RDWR)  # which does not wait for a reader
    os.write(descriptor, b"!")
    os.close(descriptor)
    if (folder / "process").exists():
        os.kill(int((folder / "process").read_text(encoding="ascii")), signal.SIGCONT)


def _store() -> Store:
    store = current().store
    assert store is not None
    return store


def _offer_stack(world: World, folder: Path) -> None:
    """Do what the launcher has a rank do before its script begins, and join() with what the launcher has said."""
    path = str(folder / f"stack-{world.rank}")
    process_probe.offer_stack(path)
    process_probe.introduce(_store(), world.rank, process_probe.this_process(path))


def _stuck(world: World, how: Callable[[Path], None], folder: Path) -> None:
    _offer_stack(world, folder)
    _train(NUM_STEPS)
    if world.rank == 1:
        how(folder)
    try:
        rw.all_reduce(torch.ones(2, 3))
    finally:
        _let_go_on(folder)


@pytest.mark.parametrize(
    ("how", "doing"),
    [
        (_load_images, "2 +after gradients of .* test_knowing_why.py:[0-9]+ in _load_images"),
        (_stop, r"- +no answer .*stopped \(SIGSTOP .*kill -CONT [0-9]+"),
        (_hold_the_lock, "- +no answer .*alive, but Python is not running: a call into C holds the GIL"),
    ],
)
def test_a_rank_that_is_stuck_is_shown_with_its_stack(
    run_ranks: RunRanks, how: Callable[[Path], None], doing: str, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe")
    results = run_ranks(_stuck, 3, how, tmp_path, join_timeout_seconds=LIMIT_SECONDS)
    host = re.escape(os.uname().nodename)
    # Let go, rank 1 may find in shared memory all it waits for before it hears that it was given up.
    for result in (results[0], results[2]):
        assert isinstance(result.error, PeerMissing), result.error
        assert result.error.ranks == (1,)
        assert result.error.evidence == results[0].error.evidence  # type: ignore[union-attr]
    text = str(results[0].error)
    waiting = r'2 +waiting in all_reduce\("sum", float32\[2, 3\]\) +test_knowing_why.py:[0-9]+ in _stuck'
    assert re.search(rf"ranks 0, 2 +{host} +{waiting}", text), text
    assert re.search(rf"rank 1 +{host} +{doing}", text), text
    assert ("stack of rank 1, innermost line last:" in text) is (how is not _stop)
    if how is not _stop:
        assert re.search(rf"test_knowing_why.py:[0-9]+ in {how.__name__}\n", text), text


def _looked_at(world: World, folder: Path) -> str:
    """Be the launcher on rank 0, with rank 1 stuck in C and rank 2 waiting for it."""
    _offer_stack(world, folder)
    _train(NUM_STEPS)
    text = ""
    if world.rank == 0:
        pids = {rank: process_probe.offered_by(str(folder / f"stack-{rank}")) for rank in (0, 1, 2)}
        answers: dict[int, dict[str, Any]] = {}
        while "silent" not in answers.get(1, {}) or answers[2]["what"] != "barrier()":  # they are on their way there
            answers = stacks_here(
                _store().clone(),
                4,
                processes={**{rank: pid for rank, pid in pids.items() if pid}, 3: os.getppid()},
                stack_files={rank: str(folder / f"stack-{rank}") for rank in pids},
                hostname="here",
                send_signal=lambda rank, number: os.kill(pids[rank] or 0, number),
            )
        text = json.loads(json.dumps(stacks_as_json(merged_stacks([{2: {"silent": "?"}}, answers]), 4)))["text"]
        _let_go_on(folder)
    elif world.rank == 1:
        _hold_the_lock(folder)
    rw.barrier()
    return text


def test_a_launcher_sees_every_rank(run_ranks: RunRanks, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    text = run_ranks(_looked_at, 3, tmp_path)[0].get()
    for line in (
        r"rank 0 +\S+ +2 +after gradients of Linear, bucket 0: \S+ +test_knowing_why.py:[0-9]+ in _looked_at",
        r"rank 1 +here +- +no answer +- +alive, but Python is not running: a call into C holds the GIL",
        r"rank 2 +\S+ +2 +(?:while sending|waiting in) barrier\(\) +test_knowing_why.py:[0-9]+ in _looked_at",
        r"rank 3 +here +- +no answer +- +running, but it has not joined the world yet or has left it",
        r"stack of rank 0, innermost line last:(\n  .*)*test_knowing_why.py:[0-9]+ in _looked_at",
        r"stack of rank 1, innermost line last:(\n  .*)*test_knowing_why.py:[0-9]+ in _hold_the_lock",
        r"stack of rank 2, innermost line last:(\n  .*)*test_knowing_why.py:[0-9]+ in _looked_at",
    ):
        assert re.search(line, text), text


def _backward_or_reduce(world: World) -> None:
    torch.manual_seed(0)
    model = rw.replicate(nn.Linear(5, 3))
    if world.rank == 1:
        rw.all_reduce(torch.ones(2))
    else:
        model(torch.randn(2, 5)).square().mean().backward()


def test_without_checking_a_mixture_is_reported_after_the_timeout(run_ranks: RunRanks) -> None:
    for result in run_ranks(_backward_or_reduce, 3, join_timeout_seconds=LIMIT_SECONDS, timeout_seconds=15.0):
        assert isinstance(result.error, CollectiveMismatch), result.error
        text = str(result.error)
        assert re.search(
            r"ranks 0, 2: gradients of Linear, bucket 0: float32\[18\] at \S+ in _backward_or_reduce", text
        )
        assert re.search(r'rank 1: all_reduce\("sum", float32\[2\]\) at \S+ in _backward_or_reduce', text)
        assert "rank 1/3 on " in text


def _compare_everything() -> None:
    """Do what RANKWISE_CHECK=1 has join() do."""
    exchange = current().exchange
    group = exchange if isinstance(exchange, TorchGroup) else exchange._torch_group  # type: ignore[union-attr]
    group.compare_everything()


class _Net(nn.Module):
    """Has a first bucket that some ranks fill before the statistics, and one only when backward has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(5, 512), nn.BatchNorm1d(512)
        self.middle, self.last = nn.Linear(512, 512), nn.Linear(512, 1)

    def forward(self, x: torch.Tensor, *, uses_all: bool) -> torch.Tensor:
        x = self.norm(self.first(x))
        return self.last(self.middle(x) if uses_all else x)


def _check(world: World, how: str, odd_rank: int) -> str:
    _compare_everything()
    odd = world.rank == odd_rank
    torch.manual_seed(0)
    net, other = rw.replicate(_Net(), sync_batchnorm=True), rw.replicate(nn.Linear(5, 3))

    def backward(model: nn.Module) -> None:
        model(torch.randn(3, 5), **({"uses_all": not odd} if model is net else {})).square().mean().backward()

    backward(net)  # with parameters that one rank does not use, and statistics that all share
    backward(net)
    backward(other)
    with pytest.raises(CollectiveMismatch) as caught:  # noqa: PT012 - one of the calls
        if how == "other collective":
            rw.all_reduce(torch.ones(2)) if odd else backward(other)
        elif how == "other model":
            backward(net if odd else other)
        elif how == "other bucket":
            channel_of = current().exchange.dup().channels  # type: ignore[union-attr]
            channel_of([_size(6 if odd else 5)], "gradients of Net")
        else:
            current().exchange.all_reduce(torch.ones(3 if odd else 2), what="statistics")  # type: ignore[union-attr]
    other.zero_grad()
    backward(other)
    gradients = rw.all_gather([p.grad.clone() for p in other.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for one in gradients for a, b in zip(one, gradients[0], strict=True))
    assert rw.all_reduce(1) == world.world_size, "nothing was sent, and the group goes on"
    return str(caught.value)


def _size(num_elements: int) -> ChannelSize:
    return ChannelSize(num_elements, 1, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(
    ("how", "most", "odd"),
    [
        ("other collective", "loss of Linear, bucket 0: float64[{report}]", 'all_reduce("sum", float32[2])'),
        ("other model", "loss of Linear, bucket 0: float64[{report}]", "BatchNorm statistics: float32[1025]"),
        ("other bucket", "gradients of Net, bucket 0: float32[5]", "gradients of Net, bucket 0: float32[6]"),
        ("other size", "statistics: float32[2]", "statistics: float32[3]"),
    ],
)
def test_with_checking_a_difference_is_reported_before_anything_is_sent(
    run_ranks: RunRanks, how: str, most: str, odd: str
) -> None:
    for num_ranks, odd_rank, others in ((2, 1, "rank 0"), (3, 2, "ranks 0-1"), (3, 0, "ranks 1-2")):
        for result in run_ranks(_check, num_ranks, how, odd_rank):
            text = result.get()
            place = r"test_knowing_why.py:[0-9]+ in \S+"
            words = re.escape(most.replace("{report}", str(channel_length(num_ranks))))
            assert re.search(rf"{others}: {words} at {place}", text), text
            assert re.search(rf"rank {odd_rank}: {re.escape(odd)} at {place}", text), text
            if num_ranks == 3:
                assert f"rank {odd_rank}/3 on {os.uname().nodename}, reported on every rank" in text


def _check_some_of_the_ranks(world: World) -> tuple[int | None, int]:
    _compare_everything()
    group = rw.new_group([0, 2])
    of_group = None if group.rank is None else rw.all_reduce(1, group=group)
    return of_group, rw.all_reduce(1)


def test_with_checking_some_of_the_ranks_call_for_themselves(run_ranks: RunRanks) -> None:
    assert [result.get() for result in run_ranks(_check_some_of_the_ranks, 3)] == [(2, 3), (None, 3), (2, 3)]


def _wait_until_it_is_said(world: World) -> tuple[list[str], list[str]]:
    """Rank 1 reaches a barrier after both others have made sure that its absence is reported."""
    store: Any = current().store
    collective_timeout.NOTICE_SECONDS = 0.2
    claim, report = CollectiveWait._claim, CollectiveWait._report_missing
    claimed: list[str] = []

    def noted(wait: CollectiveWait, purpose: str) -> bool:
        is_ours = claim(wait, purpose)
        if is_ours:
            claimed.append(purpose)
        return is_ours

    def counted(wait: CollectiveWait, waited: float) -> None:
        report(wait, waited)
        store.add("seen to", 1)

    rw.barrier()
    CollectiveWait._claim = noted  # type: ignore[method-assign]
    CollectiveWait._report_missing = counted  # type: ignore[method-assign]
    with listening() as said:
        while world.rank == 1 and store.add("seen to", 0) < 2:
            threading.Event().wait(0.01)
        rw.barrier()
    return claimed, [line for line in said if "has been waiting" in line]


def test_one_rank_reports_a_long_wait_and_names_the_missing_rank(run_ranks: RunRanks) -> None:
    found = [result.get() for result in run_ranks(_wait_until_it_is_said, 3)]
    claimed = [purpose for claims, _ in found for purpose in claims]
    # Where the machine is busy the wait may be so long that it is mentioned again.
    assert len(claimed) == len(set(claimed)) >= 1
    lines = [line for _, lines in found for line in lines]
    assert len(lines) == len(claimed)
    # The others may have been on their way there yet.
    said = re.compile(r"barrier\(\) has been waiting for \d+ s, for (rank 1|ranks [01]-[12]):")
    assert any(said.search(line) for line in lines), lines
