# SPDX-License-Identifier: Apache-2.0
"""A placed model computes what it computed before: with weights in memory, in files, in both, fetched and ahead."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
from placed_models import TOLERANCE, Block, difference, net, step_of, tower
from torch import nn
from torch.utils.checkpoint import checkpoint

from rankwise.place.place import place, placement
from rankwise.place.plan import PartSize
from rankwise.place.units import sizes_of, units_of
from rankwise.tensors.files import open_tensor_files

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("one_thread")


PLANS: dict[str, Any] = {
    "all on disk": ({"": "disk"}, None),
    "some on disk": ({"": "cpu", "blocks": "disk", "blocks.1": "cpu", "lstm": "disk"}, None),
    "all in memory": ({"": "cpu"}, None),
    "overflowing": ("auto", {"cpu": 8000}),
    "no room for two": ("sequential", {"cpu": 3200}),
}


@pytest.mark.parametrize("name", PLANS)
def test_training_is_exact(name: str, tmp_path: Path) -> None:
    plan, budgets = PLANS[name]
    one, placed = net(), net()
    before = dict(placed.named_parameters())
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in (one, placed)]
    assert place(placed, plan, budgets=budgets, offload_folder=tmp_path) is placed
    assert dict(placed.named_parameters()).items() == before.items()
    assert placed.head.weight is placed.embed.weight
    for seed in range(4):
        losses = [step_of(model, seed) for model in (one, placed)]
        assert losses[1] == pytest.approx(losses[0], rel=TOLERANCE)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert difference(placed, one) <= TOLERANCE
    on_disk = {part.module for part in placement(placed).parts if part.device == "disk"}
    assert bool(on_disk) == (name != "all in memory")
    if on_disk:
        # What the optimizer wrote is in the files.
        with open_tensor_files(next(tmp_path.iterdir())) as files:
            assert {key for key in one.state_dict() if key.startswith("lstm.")} <= set(files.entries)
            state = one.state_dict()
            for key in files.entries:
                assert torch.allclose(files.read(key), state[key], rtol=TOLERANCE, atol=TOLERANCE)
    del placed, optimizers, before
    gc.collect()
    assert list(tmp_path.iterdir()) == []


class Halves(nn.Module):
    """The model-parallel tutorials' shape: layers under their own names, and again in two halves."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks, self.fc = nn.Linear(4, 6), nn.Sequential(Block(6), Block(6)), nn.Linear(6, 3)
        self.seq1 = nn.Sequential(self.first, self.blocks[0])
        self.seq2 = nn.Sequential(self.blocks[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.seq2(self.seq1(x)))


def test_layers_registered_twice_are_placed_by_either_name(tmp_path: Path) -> None:
    torch.manual_seed(0)
    one = Halves().double()
    placed = place(copy.deepcopy(one), {"seq1": "disk", "seq2": "cpu", "": "cpu"}, offload_folder=tmp_path)
    assert {part.module for part in placement(placed).parts if part.device == "disk"} == {"first", "blocks.0"}
    x = torch.randn(5, 4, dtype=torch.float64)
    for model in (one, placed):
        model(x).square().mean().backward()
    for parameter, other in zip(one.parameters(), placed.parameters(), strict=True):
        assert torch.allclose(parameter.grad, other.grad, rtol=TOLERANCE)


def test_tied_parts_are_known(tmp_path: Path) -> None:
    sizes = {size.name: size for size in sizes_of(units_of(net()), lambda slot: slot.tensor.nbytes)}
    assert list(sizes) == ["shift", "embed", "blocks.0", "blocks.1", "blocks.2", "attention", "lstm", "head"]
    assert sizes["head"] == PartSize("head", 13 * 8, (13 + 13 * 6) * 8, "embed")
    one, placed = net(), place(net(), {"": "cpu", "head": "disk"}, offload_folder=tmp_path)
    assert "weights shared with embed are on cpu" in str(placement(placed))
    assert step_of(placed, 0) == pytest.approx(step_of(one, 0), rel=TOLERANCE)
    assert torch.allclose(placed.embed.weight.grad, one.embed.weight.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("recompute", ["reentrant", "not reentrant"])
def test_recomputing_activations(recompute: str, tmp_path: Path) -> None:
    one, placed = net(), net(recompute=recompute)
    place(placed, {"": "disk"}, offload_folder=tmp_path)
    calls: list[nn.Module] = []
    placed.blocks[1].up.register_forward_hook(lambda module, *_: calls.append(module))
    for seed in range(2):
        assert step_of(placed, seed) == pytest.approx(step_of(one, seed), rel=TOLERANCE)
        assert len(calls) == 2 * (seed + 1)
    for (name, left), right in zip(placed.named_parameters(), one.parameters(), strict=True):
        assert torch.allclose(left.grad, right.grad, rtol=1e-9, atol=1e-12), name


class Attending(nn.Module):
    """Queries, keys and values that differ: each is multiplied by a part of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.values = nn.Linear(6, 6), nn.Linear(6, 6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, self.keys(x), self.values(x), need_weights=False)[0]


def test_layers_before_a_weight_that_is_used_in_parts_get_their_gradients(tmp_path: Path) -> None:
    torch.manual_seed(0)
    one = Attending().double()
    placed = place(copy.deepcopy(one), {"": "disk"}, offload_folder=tmp_path)
    x = torch.randn(5, 3, 6, dtype=torch.float64)
    for model in (one, placed):
        model(x).square().sum().backward()
    for (name, left), right in zip(placed.named_parameters(), one.parameters(), strict=True):
        assert torch.allclose(left.grad, right.grad, rtol=1e-9, atol=1e-12), name


def test_recomputing_a_layer_inside_a_block(tmp_path: Path) -> None:
    class Recomputing(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + checkpoint(lambda x: self.down(torch.relu(self.up(x))), self.norm(x), use_reentrant=False)

    torch.manual_seed(0)
    one = nn.Sequential(Block(4), Block(4)).double()
    placed = nn.Sequential(Recomputing(4), Recomputing(4)).double()
    placed.load_state_dict(one.state_dict())
    place(placed, {"": "disk"}, offload_folder=tmp_path)
    x = torch.randn(5, 4, dtype=torch.float64)
    for model in (one, placed):
        model(x).square().sum().backward()
    for left, right in zip(placed.parameters(), one.parameters(), strict=True):
        assert torch.allclose(left.grad, right.grad, rtol=1e-9, atol=1e-12)


def test_inference_frozen_layers_and_second_derivatives(tmp_path: Path) -> None:
    one = tower(3)
    one[1].requires_grad_(False)
    placed = place(copy.deepcopy(one), {"": "disk"}, offload_folder=tmp_path)
    x = torch.randn(4, 20, dtype=torch.float64)
    with torch.no_grad():
        assert torch.equal(placed(x), one(x))
    with torch.inference_mode():
        assert torch.equal(placed(x), one(x))
    # A layer on its own, without the model around it.
    assert torch.equal(placed[1](x), one[1](x))
    seconds = []
    for model in (one, placed):
        output = torch.tanh(model(x)).sum()
        (first,) = torch.autograd.grad(output, model[0].weight, create_graph=True)
        first.square().sum().backward()
        assert model[1].weight.grad is None
        seconds.append(model[2].weight.grad)
    assert torch.allclose(seconds[0], seconds[1], rtol=1e-9, atol=1e-12)


def test_a_copy_is_a_plain_model(tmp_path: Path) -> None:
    model = place(tower(), {"": "disk"}, offload_folder=tmp_path)
    x = torch.randn(4, 20, dtype=torch.float64)
    expected = model(x)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301 - of our own
        with torch.no_grad():
            model[0].weight.mul_(1)
            copied[0].weight.mul_(2)
            assert torch.allclose(copied(x), 2 * expected)
        assert torch.equal(model(x), expected)
        place(copied, {"": "cpu"})


def test_layers_on_different_devices_meet() -> None:
    """The only second device of a machine without GPUs holds shapes and no numbers."""

    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(4))
            self.down = nn.Linear(4, 4)
            self.deep = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
            self.up = nn.Linear(8, 3)

        def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> dict[str, torch.Tensor]:
            skip = self.down(x) + self.bias
            deep = self.deep(skip) * scale
            back = self.up(torch.cat([skip, deep], dim=1))
            back += skip[:, :3]
            torch.add(self.down(x).detach(), 1, out=torch.empty_like(deep))
            return {"skip": skip, "deep": deep, "back": back}

    model = Skip()
    model.deep.to("meta")
    model.up.to("meta")
    place(model, {"": "meta", "down": "cpu", "bias": "cpu"})
    output = model(torch.ones(2, 4), scale=torch.ones(2, 1))
    assert {name: (str(tensor.device), tuple(tensor.shape)) for name, tensor in output.items()} == {
        "skip": ("cpu", (2, 4)), "deep": ("meta", (2, 4)), "back": ("meta", (2, 3)),
    }  # fmt: skip
