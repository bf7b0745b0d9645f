# SPDX-License-Identifier: Apache-2.0
"""Calls in which samples meet, or that read their values, are found by one batch, whatever its values."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from rankwise.auto.coupling import CouplingWatch
from rankwise.replicate.random_numbers.batch_tracer import BatchTracer
from rankwise.replicate.random_numbers.sample_layout import SampleLayout

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS, LENGTH, WIDTH = 4, 4, 6
"""As many rows as steps: the dims must not be told apart by their sizes."""


def _watched(call: Callable[[torch.Tensor], object], *, dim: int = 0) -> str | None:
    x = torch.randn(ROWS, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True)
    watch = CouplingWatch(ROWS)
    with watch.watching([(x, dim)]):
        call(x)
    return watch.found


GRU = nn.GRU(WIDTH, WIDTH, batch_first=True).double()
LSTM = nn.LSTM(WIDTH, WIDTH, 4, batch_first=True).double()
SEPARATE: dict[str, Callable[[torch.Tensor], object]] = {
    "mean over time": lambda x: x.mean(1) - x.amax(1),
    "all but the batch": lambda x: functional.layer_norm(x, [LENGTH, WIDTH]).flatten(1).softmax(1),
    "batch and time as one": lambda x: functional.linear(x.reshape(-1, WIDTH), torch.ones(3, WIDTH).double()).view(
        ROWS, -1
    ),
    "attention": lambda x: functional.scaled_dot_product_attention(x, x, x, torch.ones(LENGTH, LENGTH).bool().tril()),
    "recurrent": LSTM,
    "recurrent, then more": lambda x: GRU(x)[0].softmax(-1).cumsum(1).mean(1),
    "dropout": lambda x: functional.dropout1d(functional.dropout(x), 0.5),
    "embedding": lambda x: functional.embedding(x.detach().long().abs().clamp(max=4), torch.zeros(5, 3)),
    "values of weights": lambda x: x * 2 if torch.ones(3).max() > 0 else x,
    "in place": lambda x: x.clone().relu_().mul_(2).add_(torch.ones(WIDTH)),
    "instance norm": lambda x: functional.instance_norm(x, use_input_stats=True),
    "packed and padded": lambda x: pad_packed_sequence(
        pack_padded_sequence(x, torch.full((ROWS,), 2), batch_first=True), batch_first=True, total_length=LENGTH
    )[0].mean(1),
    "one step at a time": lambda x: torch.stack([x[:, step].tanh() for step in range(LENGTH)], 1).sum((1, 2)),
}
MEETING: dict[str, tuple[Callable[[torch.Tensor], object], str]] = {
    "mean": (lambda x: x - x.mean(0), "samples meet in mean"),
    "largest": (lambda x: torch.where(x.abs().max() > 9, x / 2, x), "samples meet in max"),
    "loss": (lambda x: functional.mse_loss(x, x.detach()), "samples meet in mse_loss"),
    "pairs": (lambda x: x.flatten(1).T @ x.flatten(1), "samples meet in mm"),
    "attention over samples": (lambda x: (x.flatten(1) @ x.flatten(1).T).softmax(1), "samples meet in mm"),
    "flat": (lambda x: x.reshape(-1, WIDTH).sum(0), "samples meet in sum"),
    "over time, then over samples": (lambda x: (x.sum(1), x.sum(0)), "samples meet in sum"),
    "over time, then over time of what lies the other way round": (
        lambda x: (x.sum(1), x.transpose(0, 1).contiguous().sum(1)),
        "samples meet in sum",
    ),
    "item": (lambda x: x[0, 0, 0].item(), "it decides by values of its samples"),
    "decision": (lambda x: x * 2 if x[0, 0, 0] > 9 else x, "it decides by values of its samples"),
    "numpy": (lambda x: x.detach().numpy().max(), "it decides by values of its samples (numpy"),
    "list": (lambda x: x.tolist(), "it decides by values of its samples (tolist"),
    "mask": (lambda x: x[x > 0], "it decides by values of its samples"),
    "nonzero": (lambda x: x.nonzero(), "it decides by values of its samples (nonzero"),
    "values of packed sequences": (
        lambda x: pack_padded_sequence(x, torch.full((ROWS,), 2), batch_first=True).data.mean(0),
        "it decides by values of its samples (a packed sequence",
    ),
    "packed along the samples": (
        lambda x: pack_padded_sequence(x, torch.full((LENGTH,), 2)),
        "it decides by values of its samples (pack_padded_sequence",
    ),
    "padded to the longest": (
        lambda x: pad_packed_sequence(pack_padded_sequence(x, torch.full((ROWS,), 2), batch_first=True)),
        "it decides by values of its samples (pad_packed_sequence, which needs total_length=",
    ),
}


@pytest.mark.parametrize("call", SEPARATE.values(), ids=SEPARATE)
def test_separate_samples_do_not_meet(call: Callable[[torch.Tensor], object]) -> None:
    assert _watched(call) is None


def test_what_steps_repeat_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []
    real = BatchTracer._computed_grown
    monkeypatch.setattr(BatchTracer, "_computed_grown", lambda *args: (computed.append(1), real(*args))[1])
    cell = nn.LSTMCell(WIDTH, WIDTH).double()

    def steps(x: torch.Tensor, number: int) -> None:
        state = None
        for _ in range(number):
            state = cell(x[:, 0], state)

    numbers = []
    for number in (3, 30):
        computed.clear()
        assert _watched(partial(steps, number=number)) is None
        numbers.append(len(computed))
    assert numbers[0] == numbers[1] > 0


@pytest.mark.parametrize(("call", "words"), MEETING.values(), ids=MEETING)
def test_samples_that_meet_are_found(call: Callable[[torch.Tensor], object], words: str) -> None:
    found = _watched(call)
    assert found is not None
    assert found.startswith(words)
    assert "test_auto_coupling.py" in found


def test_rows_may_lie_in_the_second_dim() -> None:
    assert _watched(lambda x: x.mean(0), dim=1) is None
    assert _watched(lambda x: x.mean(1), dim=1) is not None


def test_nothing_is_noted_while_the_watch_is_paused() -> None:
    x = torch.ones(ROWS, 2)
    watch = CouplingWatch(ROWS)
    with watch.watching([(x, 0)]):
        with watch.paused():
            centred = x - x.mean(0)
        assert watch.found is None
        centred.sum()
    assert watch.found is not None


def test_rows_are_followed_into_dims_that_they_share() -> None:
    x = torch.randn(ROWS, LENGTH, WIDTH)
    watch = CouplingWatch(ROWS)
    with watch.watching([(x, 0)]):
        flat = x.tanh().reshape(-1, WIDTH)
        time_first = x.transpose(0, 1).reshape(-1, WIDTH)
        of_none = torch.ones(3) * 2
    assert watch.layout_of(flat) == SampleLayout(0, inner=LENGTH)
    assert watch.layout_of(time_first) == SampleLayout(0, outer=LENGTH)
    assert watch.layout_of(of_none) is None
    assert watch.holds_samples(flat)
    assert not watch.holds_samples(of_none)
