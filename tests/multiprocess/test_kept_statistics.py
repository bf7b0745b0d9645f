# SPDX-License-Identifier: Apache-2.0
"""What a loop keeps of one batch for the loss of the next: named if it is of a rank's samples, else exact."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import pytest
import torch
from replicas import TOLERANCE, largest_difference
from said import check_said, listening
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import rankwise as rw
from rankwise import testing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from replicas import Parameters

    from rankwise.world.facts import World

    Tensor = torch.Tensor
    Whole = Callable[[Tensor], Tensor]
    Loss = Callable[[nn.Module, nn.Module, Sequence[Tensor], Whole], tuple[Tensor, Callable[[], None]]]
    """Returns the loss, and what to do after the step."""

NUM_SAMPLES = 23
BATCH_SIZE = 8


class Center:
    """The center of the teacher's outputs, as DINO has it."""

    def __init__(self) -> None:
        self.center = torch.zeros(1, 4, dtype=torch.float64)

    def __call__(
        self, model: nn.Module, teacher: nn.Module, batch: Sequence[Tensor], whole: Whole
    ) -> tuple[Tensor, Callable[[], None]]:
        with torch.no_grad():
            target = teacher(batch[1])
        loss = -((target - self.center).softmax(1) * model(batch[0]).log_softmax(1)).sum(1).mean()

        def keep() -> None:
            self.center = 0.9 * self.center + 0.1 * whole(target).mean(0, keepdim=True)

        return loss, keep


class Queue:
    """The queue of the teacher's outputs, as MoCo has it, written in place or by joining."""

    def __init__(self, *, is_joined: bool) -> None:
        self.is_joined = is_joined
        self.queue = torch.randn(24, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        self.place = 0

    def __call__(
        self, model: nn.Module, teacher: nn.Module, batch: Sequence[Tensor], whole: Whole
    ) -> tuple[Tensor, Callable[[], None]]:
        rows = model(batch[0])
        with torch.no_grad():
            keys = teacher(batch[1])
        others = rows @ self.queue.clone().T
        logits = torch.cat([(rows * keys).sum(1, keepdim=True), others], 1)
        loss = functional.cross_entropy(logits, torch.zeros(len(rows), dtype=torch.long))

        def keep() -> None:
            added = whole(keys)
            if self.is_joined:
                self.queue = torch.cat([self.queue, added])[-24:]
            else:
                self.queue[torch.arange(self.place, self.place + len(added)) % 24] = added
                self.place += len(added)

        return loss, keep


class Memory:
    """A memory of each sample's outputs, as early-learning regularization has it."""

    def __init__(self) -> None:
        self.memory = torch.zeros(NUM_SAMPLES, 4, dtype=torch.float64)

    def __call__(
        self, model: nn.Module, _: nn.Module, batch: Sequence[Tensor], whole: Whole
    ) -> tuple[Tensor, Callable[[], None]]:
        out = model(batch[0])
        loss = functional.mse_loss(out, self.memory[(batch[2] + 3) % NUM_SAMPLES])

        def keep() -> None:
            self.memory[whole(batch[2])] = whole(out.detach())

        return loss, keep


class Rows:
    """The state of each row, carried to the next batch: no sample meets another."""

    def __init__(self) -> None:
        self.state: Tensor | None = None

    def __call__(
        self, model: nn.Module, _: nn.Module, batch: Sequence[Tensor], __: Whole
    ) -> tuple[Tensor, Callable[[], None]]:
        out = model(batch[0])
        before = out.detach().roll(1, 1) if self.state is None else self.state[: len(out)]
        loss = functional.mse_loss(out, before)

        def keep() -> None:
            self.state = out.detach().clone()

        return loss, keep


LOSSES: dict[str, tuple[Callable[[], Loss], str]] = {
    "center": (Center, "mean at test_kept_statistics.py:"),
    "queue": (lambda: Queue(is_joined=False), "index_put at test_kept_statistics.py:"),
    "queue joined": (lambda: Queue(is_joined=True), "keeping samples in a tensor at test_kept_statistics.py:"),
    "memory": (Memory, "index_put at test_kept_statistics.py:"),
}


def _dataset(num: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x, other = torch.randn(2, NUM_SAMPLES, 3, generator=generator, dtype=torch.float64)
    return TensorDataset(x[:num], other[:num], torch.arange(num))


def _train(
    spread: Callable[[nn.Module], nn.Module], batches: Iterable[Sequence[Tensor]], loss_of: Loss, whole: Whole
) -> Parameters:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).double()
    teacher = copy.deepcopy(model).requires_grad_(False)
    model = spread(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for _ in range(2):
        for batch in batches:
            loss, keep = loss_of(model, teacher, batch, whole)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for mine, its in zip(teacher.parameters(), model.parameters(), strict=True):
                    mine.mul_(0.9).add_(its, alpha=0.1)
            keep()
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


def _on_ranks(_: World, name: str, is_whole: bool) -> tuple[Parameters, list[str]]:
    loader = rw.DataLoader(_dataset(NUM_SAMPLES), global_batch_size=BATCH_SIZE)
    with listening() as said:
        found = _train(rw.replicate, loader, LOSSES[name][0](), rw.whole_batch if is_whole else lambda one: one)
        rw.barrier()
    return found, said


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("name", LOSSES)
def test_what_is_kept_of_all_ranks_samples_is_that_of_one_rank(name: str, num_ranks: int) -> None:
    batches = DataLoader(_dataset(NUM_SAMPLES), BATCH_SIZE)
    expected = _train(lambda one: one, batches, LOSSES[name][0](), lambda one: one)
    for result in testing.run_ranks(_on_ranks, num_ranks, name, True):
        found, said = result.get()
        assert largest_difference(found, expected) < TOLERANCE
        check_said(said, [])


@pytest.mark.parametrize("name", LOSSES)
def test_what_is_kept_of_a_ranks_samples_is_named_once_with_its_line(name: str) -> None:
    said = [text for result in testing.run_ranks(_on_ranks, 2, name, False) for text in result.get()[1]]
    check_said(said, [LOSSES[name][1]])
    assert "combines the samples of this rank" in said[0]
    assert "rankwise.whole_batch(x)" in said[0]


def _rows(_: World) -> tuple[Parameters, list[str]]:
    loader = rw.DataLoader(_dataset(16), global_batch_size=BATCH_SIZE)
    with listening() as said:
        found = _train(rw.replicate, loader, Rows(), lambda one: one)
    return found, said


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_rows_that_are_kept_for_the_same_rows_are_exact_and_not_named(num_ranks: int) -> None:
    expected = _train(lambda one: one, DataLoader(_dataset(16), BATCH_SIZE), Rows(), lambda one: one)
    for result in testing.run_ranks(_rows, num_ranks):
        found, said = result.get()
        assert largest_difference(found, expected) < TOLERANCE
        check_said(said, [])
