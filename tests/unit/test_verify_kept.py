# SPDX-License-Identifier: Apache-2.0
"""Names that a script keeps from step to step and computes its loss from, and their values."""

from __future__ import annotations

from collections import deque

import pytest
import torch

from rankwise.verify.kept import names_kept, values_kept

LOOP = """
for epoch in range(3):
    for x, y in loader:
        {}
        loss.backward()
        optimizer.step()
        {}
"""


def names(before: str, after: str = "pass", head: str = "") -> set[str]:
    return {one.name for one in names_kept(head + LOOP.format(before, after), "train.py")}


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        ("loss = f(model(x), queue)", "queue = torch.cat([queue, k])[-16:]", {"queue"}),
        ("loss = f(model(x), queue)", "queue[at : at + 4] = k; at += 4", {"queue", "at"}),
        ("loss = f(model(x) - seen[-1])", "seen.append(x.mean())", {"seen"}),
        ("z = model(x) - level; loss = z.mean()", "level = 0.9 * level + 0.1 * x.mean()", {"level"}),
        ("scale = 1 if old is None else old; loss = f(x) * scale", "old = 2 if old is None else 3", {"old"}),
        # Read in the order of a step, not kept: made before it is read.
        ("h = model(x); h = h + 1; loss = h.sum()", "pass", set()),
        ("loss = f(x)", "total += loss.item(); print(total)", set()),
        ("loss = f(x)", "losses.append(loss.item()); mean = sum(losses) / len(losses)", set()),
        ("loss = f(x, data)", "pass", set()),
    ],
)
def test_names_that_a_loss_follows_from(before: str, after: str, found: set[str]) -> None:
    assert names(before, after) == found


CENTER = """
class Loss(nn.Module):
    def __init__(self):
        self.center = 0.0
        self.total = 0.0
    def forward(self, t):
        self.total += t.sum()
        loss = (t - self.center).sum()
        self.center = 0.9 * self.center + t.mean()
        return loss
class Pool:
    def query(self, x):
        self.held.append(x)
        return self.held[0]
def stack(h):
    for layer in layers:
        h = layer(h)
    return h
"""


def test_names_in_functions() -> None:
    assert names("h = pool.query(x); loss = criterion(stack(h))", head=CENTER) == {".center", ".held", "h"}
    kept = names_kept(CENTER + LOOP.format("h = pool.query(x); loss = criterion(stack(h))", "pass"), "train.py")
    # Of the loop in stack() alone.
    assert [one.lines for one in kept if one.name == "h"] == [range(16, 18)]
    assert [one.line for one in kept if one.name == ".center"] == ["train.py:9"]


class Memory:
    def __init__(self) -> None:
        self.held = torch.ones(3)


class Criterion(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory()
        self.register_buffer("center", torch.zeros(2))


def test_values_of_variables_and_of_objects() -> None:
    text = CENTER + LOOP.format("loss = criterion(level * pool.query(x), recent)", "level *= 2; recent.append(x)")
    kept = names_kept(text, "train.py")
    line = next(one.lines.start for one in kept if one.name == "level")
    variables = {"criterion": Criterion(), "level": 0.5, "recent": deque([torch.ones(2), torch.zeros(2)]), "other": 3.0}
    found = values_kept(kept, variables, line, lambda value: isinstance(value, Memory))
    assert {name: sketch.shape for name, (sketch, _) in found.items()} == {
        "criterion.center": (2,),
        "criterion.memory.held": (3,),
        "level": (),
        "recent": (4,),
    }
    assert found["level"][0].squares == 0.25
    # Another loop of the script.
    assert "level" not in values_kept(kept, variables, 1, lambda _: False)
