# SPDX-License-Identifier: Apache-2.0
"""Values of the wrong kind, given to calls of one rank: each is an error of rankwise with the fix, in a few lines."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from small_datasets import Squares

import rankwise as rw
from rankwise.errors import ConfigurationError, DatasetError

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("world_of_one")

MOST_LINES = 12


class NoLength:
    def __getitem__(self, index: int) -> int:
        return index


class HalfLength(NoLength):
    def __len__(self) -> float:  # type: ignore[override]
        return 2.5  # noqa: PLE0303


def loader(dataset: Any = None, **options: Any) -> rw.DataLoader:
    return rw.DataLoader(Squares() if dataset is None else dataset, global_batch_size=4, **options)


def in_no_sync(model: Any) -> None:
    with rw.no_sync(model):
        pass


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "workers as text": (lambda: loader(num_workers="2"), "num_workers must be at least 0, got '2'"),
    "no number of workers": (lambda: loader(num_workers=None), "num_workers must be at least 0, got None"),
    "no timeout": (lambda: loader(num_workers=1, timeout_seconds=None), "timeout_seconds must be a number"),
    "no function": (lambda: loader(num_workers=1, worker_init_fn=3), "worker_init_fn must be a function"),
    "no start method": (lambda: loader(num_workers=1, multiprocessing_context="forks"), "use one of fork, spawn"),
    "no seed": (lambda: loader(shuffle=True, seed=None), "seed must be an integer, got None"),
    "half a seed": (lambda: rw.ShardedSampler(Squares(), global_batch_size=4, seed=1.5), "an integer, got 1.5"),  # type: ignore[arg-type]
    "shuffle as text": (lambda: loader(shuffle="no"), "shuffle must be True or False, got 'no'"),
    "text": (lambda: loader("train.csv"), "A str is not a dataset: its samples would be its characters."),
    "one number": (lambda: loader(torch.tensor(3.0)), "A Tensor has no number of samples"),
    "no length": (lambda: loader(NoLength()), "object of type 'NoLength' has no len()"),
    "half a length": (lambda: loader(HalfLength()), "A HalfLength has no number of samples"),
    "a sampler of nothing": (lambda: rw.ShardedSampler(None, global_batch_size=4), "has no number of samples"),  # type: ignore[arg-type]
    "no state": (lambda: loader().load_state_dict(None), "it holds nothing"),  # type: ignore[arg-type]
    "a lambda": (lambda: rw.all_gather_object(lambda: 1), "all_gather_object() cannot send a function"),
    "a lock": (lambda: rw.broadcast_object(threading.Lock()), "broadcast_object() cannot send a lock"),
    "rows of numbers": (lambda: rw.whole_batch([1, 2]), "whole_batch joins the rows"),
    "no model": (lambda: in_no_sync(3), "no_sync() was given a int that is neither replicated nor sharded"),
    "nothing to iterate": (lambda: next(rw.progress(3)), "progress() takes what can be iterated, got a int"),  # type: ignore[call-overload]
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_value_is_named(name: str) -> None:
    call, words = WRONG[name]
    with pytest.raises(ConfigurationError) as caught:
        call()
    text = str(caught.value)
    assert words in text
    assert "\n  do        " in text
    assert len(text.splitlines()) <= MOST_LINES


@pytest.mark.filterwarnings("ignore:Got pickle error")
def test_a_dataset_that_cannot_reach_its_workers_is_named() -> None:
    batches = loader([lambda: 1] * 8, num_workers=1, multiprocessing_context="spawn", compare_samples=False)
    with pytest.raises(DatasetError, match="what they need cannot be pickled") as caught:
        next(iter(batches))
    assert "<lambda>" in (caught.value.evidence or "")
    assert 'pass "fork"' in (caught.value.do or "")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_a_device_that_is_not_here_is_named() -> None:
    with pytest.raises(ConfigurationError, match="but torch finds no accelerator in this process"):
        loader(device="cuda")
