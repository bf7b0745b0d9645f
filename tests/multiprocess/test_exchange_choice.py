# SPDX-License-Identifier: Apache-2.0
"""Which exchange ranks use: chosen automatically, the same on all, and logged if it differs from the request."""

from __future__ import annotations

import logging
import os
import resource
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import rankwise as rw
from rankwise.comm.backends.mapping import PAGE_BYTES, open_together
from rankwise.comm.backends.shared_memory import SLOT_BYTES, SharedMemory
from rankwise.comm.backends.torch_group import TorchGroup
from rankwise.comm.session import current
from rankwise.errors import ConfigurationError
from rankwise.log import logger
from rankwise.testing import run_ranks as run_ranks_auto

if TYPE_CHECKING:
    from pathlib import Path

    from rankwise.world.facts import World

pytestmark = pytest.mark.every_exchange


def _how(_: World) -> str:
    return type(current().exchange).__name__


@pytest.mark.parametrize(
    ("exchange", "expected"),
    [("auto", SharedMemory), ("shared_memory", SharedMemory), ("gloo", TorchGroup)],
)
def test_ranks_of_one_host_take_shared_memory_by_themselves(exchange: str, expected: type) -> None:
    for result in run_ranks_auto(_how, 2, exchange=exchange):
        assert result.get() == expected.__name__


def test_an_unknown_exchange_names_the_known_ones() -> None:
    (result,) = run_ranks_auto(_how, 1, exchange="sockets")
    assert isinstance(result.error, ConfigurationError)
    assert "auto, shared_memory, gloo" in str(result.error)


class Said(logging.Handler):
    """Keeps what rankwise says, while attached to its logger."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> list[str]:
        logger.addHandler(self)
        logger.setLevel(logging.INFO)
        return self.lines

    def __exit__(self, *_: object) -> None:
        logger.removeHandler(self)


def _join_again(world: World, folder: Path, wanted: str, *, short_of_memory: bool) -> tuple[str, list[str]]:
    """Join a second world over the first one's store, with what this rank wants and may have."""
    rw.leave()
    if short_of_memory:
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (SLOT_BYTES, hard))
    again = {"init_method": f"file://{folder}/again", "rank": world.rank, "world_size": world.world_size}
    with Said() as lines:
        try:
            with rw.join(**again, exchange=wanted, timeout_seconds=20):
                total = rw.all_reduce(1)
                return f"{type(current().exchange).__name__} of {total}", lines
        except ConfigurationError as error:
            return str(error), lines


def _without_memory(world: World, folder: Path, wanted: str) -> tuple[str, list[str]]:
    return _join_again(world, folder, wanted, short_of_memory=world.rank == 0)


def test_without_memory_it_is_gloo_and_rank_zero_says_why(tmp_path: Path) -> None:
    results = [result.get() for result in run_ranks_auto(_without_memory, 3, tmp_path, "auto")]
    assert [how for how, _ in results] == ["TorchGroup of 3"] * 3
    said = [[line for line in lines if line.startswith("exchange: ")] for _, lines in results]
    assert said[1:] == [[], []]
    (line,) = said[0]
    assert line.startswith("exchange: Gloo; not shared memory: rank 0: ")
    assert "File too large" in line


def test_without_memory_shared_memory_is_an_error_on_every_rank(tmp_path: Path) -> None:
    for result in run_ranks_auto(_without_memory, 2, tmp_path, "shared_memory"):
        text, _ = result.get()
        assert "cannot use shared memory" in text
        assert "File too large" in text


def _different(world: World, folder: Path, odd: int) -> tuple[str, list[str]]:
    return _join_again(world, folder, "auto" if world.rank == odd else "gloo", short_of_memory=False)


@pytest.mark.parametrize(("odd", "others"), [(0, "ranks 1-2"), (2, "ranks 0-1")])
def test_different_exchanges_are_an_error_on_every_rank(tmp_path: Path, odd: int, others: str) -> None:
    for result in run_ranks_auto(_different, 3, tmp_path, odd):
        text, _ = result.get()
        assert "exchange= differs between ranks" in text
        assert f"{others}: exchange='gloo'" in text


def _compare_on_one(world: World, folder: Path, odd: int) -> tuple[str, list[str]]:
    if world.rank == odd:
        os.environ["RANKWISE_CHECK"] = "1"
    return _join_again(world, folder, "auto", short_of_memory=False)


@pytest.mark.parametrize("odd", [0, 2])
def test_comparing_on_some_ranks_only_is_an_error_on_every_rank(tmp_path: Path, odd: int) -> None:
    for result in run_ranks_auto(_compare_on_one, 3, tmp_path, odd):
        text, _ = result.get()
        assert "RANKWISE_CHECK is set on some ranks only" in text
        assert f"rank {odd}: RANKWISE_CHECK is set" in text
        assert f"{'ranks 1-2' if odd == 0 else 'ranks 0-1'}: RANKWISE_CHECK is not set" in text


def _train_short_of_memory(world: World) -> tuple[float, list[str]]:
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SLOT_BYTES, hard))
    torch.manual_seed(0)
    with Said() as lines:
        model = rw.replicate(nn.Linear(1000, 1000))
    model(torch.full((1, 1000), float(world.rank))).mean().backward()
    assert model.weight.grad is not None
    return model.weight.grad[0, 0].item(), lines


def test_gradients_that_find_no_memory_go_through_gloo() -> None:
    (gradient, lines), (other, _) = (
        result.get() for result in run_ranks_auto(_train_short_of_memory, 2, exchange="shared_memory")
    )
    assert gradient == other == pytest.approx(0.5 / 1000)
    assert "gradients go through Gloo: no shared memory" in lines[0]


def _open_what_one_rank_cannot_reserve(world: World) -> tuple[bool, dict[int, str]]:
    exchange = current().exchange
    assert exchange is not None
    own_part = (0, PAGE_BYTES) if world.rank != 1 else (-1, PAGE_BYTES)
    mapping, reasons = open_together(exchange, PAGE_BYTES, [own_part], first=0)
    return mapping is None, reasons


def test_memory_that_one_rank_cannot_get_is_used_by_none() -> None:
    for result in run_ranks_auto(_open_what_one_rank_cannot_reserve, 2):
        is_none, reasons = result.get()
        assert is_none
        assert list(reasons) == [1]
