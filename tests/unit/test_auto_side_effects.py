# SPDX-License-Identifier: Apache-2.0
"""What a call changes in Python is found, by name: attributes, classes, globals, generators, output and hooks."""

from __future__ import annotations

import random
import sys
from collections import Counter, deque
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

from rankwise.tools.auto.side_effects import MOST_FACTS, Effects, changed, python_state

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

COUNTS: Counter[str] = Counter()
TORCHS = torch.Generator().manual_seed(0)
TABLE = np.zeros(5000)
DRAWS = np.random.default_rng(0)


class Meter:
    def __init__(self) -> None:
        self.total = 0


class Net(nn.Module):
    num_seen = 0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.meter = Meter()
        self.sizes: list[int] = []
        self.words = {"one", "two"}
        self.last: deque[torch.Tensor] = deque([torch.zeros(2)])
        self.draws = random.Random(0)
        self.temperature = 1.0
        self.itself = self


def _count_in_class() -> None:
    Net.num_seen += 1


HUGE = 10**5000
"""Has more digits than Python writes."""


class Unlooked(dict[str, int]):
    """Cannot be looked at."""

    def __len__(self) -> int:
        raise OSError("closed")


CLOSED = Unlooked()
CHANGES: dict[str, tuple[Callable[[Net], Any], str]] = {
    "list": (lambda net: net.sizes.append(3), ".sizes"),
    "set": (lambda net: net.words.add("three"), ".words"),
    "object": (lambda net: setattr(net.meter, "total", 4), ".meter.total"),
    "class": (lambda _: _count_in_class(), "Net.num_seen"),
    "float": (lambda net: setattr(net, "temperature", 0.5), ".temperature"),
    "generator": (lambda net: net.draws.random(), ".draws"),
    "kept tensor": (lambda net: net.last.append(torch.zeros(2)), ".last"),
    "other tensor": (lambda net: net.last.__setitem__(0, torch.zeros(2)), ".last[0]"),
    "tensor in place": (lambda net: net.last[0].add_(1), ".last[0]"),
    "global counts": (lambda _: COUNTS.update(["x"]), "the global COUNTS"),
    "global generator": (lambda _: DRAWS.random(), "the global DRAWS"),
    "generator of torch": (lambda _: torch.rand(2, generator=TORCHS), "the global TORCHS"),
    "large array": (lambda _: TABLE.__setitem__(2500, 1.0), "the global TABLE"),
    "new attribute": (lambda net: setattr(net, "cache", {}), ".cache"),
    "removed": (lambda net: delattr(net, "temperature"), ".temperature"),
    "part": (lambda net: setattr(net.layer, "calls", 1), "layer.calls"),
}


@pytest.mark.parametrize(("change", "name"), CHANGES.values(), ids=CHANGES)
def test_a_change_is_named(change: Callable[[Net], Any], name: str) -> None:
    net = Net()
    before = python_state(net)
    net.layer(torch.zeros(3, 2))
    assert changed(before, python_state(net)) is None
    change(net)
    assert changed(before, python_state(net)) == name


def test_output_and_hooks_are_noted() -> None:
    x = torch.ones(2, requires_grad=True)

    def retain() -> None:
        x.square().retain_grad()

    actions: list[tuple[Callable[[], object], str | None]] = [
        (x.square, None),
        (lambda: sys.stdout.write("a line"), "it prints"),
        (lambda: sys.stderr.write("a line"), "it prints"),
        (lambda: x.register_hook(lambda _: None), "it calls Tensor.register_hook"),
        (retain, "it calls Tensor.retain_grad"),
    ]
    for action, expected in actions:
        effects = Effects()
        with effects.noted():
            action()
        assert (effects.found or "").startswith(expected or "")
        assert (effects.found is None) == (expected is None)


def test_no_more_of_a_data_set_is_looked_at_than_its_first_entries() -> None:
    net = Net()
    net.sizes = [[number] * 1000 for number in range(1000)]  # type: ignore[misc]
    state = python_state(net)
    of_sizes = [name for name in state if name.startswith(".sizes")]
    assert MOST_FACTS / 2 < len(of_sizes) <= MOST_FACTS
    assert {".meter.total", "the global TABLE"} <= state.keys(), "what comes after it is looked at"


def test_a_large_file_that_is_mapped_is_not_read(tmp_path: Path) -> None:
    net = Net()
    net.table = np.memmap(tmp_path / "table", dtype=np.int8, mode="w+", shape=(2**20, 2**20))  # type: ignore[assignment]
    assert python_state(net)[".table"] == (2**20, 2**20)


def test_each_of_many_sets_is_looked_at() -> None:
    net = Net()
    net.sizes = [{number} for number in range(500)]  # type: ignore[misc]
    state = python_state(net)
    assert [number for number in range(500) if f".sizes[{number}]" not in state] == []
