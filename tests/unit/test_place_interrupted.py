# SPDX-License-Identifier: Apache-2.0
"""A placed model whose forward raises, and whose parameters are replaced."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from placed_models import TOLERANCE, Block, Net, net, step_of, tower
from torch import nn

from rankwise.errors import ConfigurationError, RankwiseError
from rankwise.place.place import place

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_forward_that_raises_leaves_nothing_behind(tmp_path: Path) -> None:
    one, placed = net(), place(net(), {"": "disk"}, offload_folder=tmp_path)
    with pytest.raises(IndexError):
        placed(torch.tensor([[13]]))
    broken = placed.attention.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step_of(placed, 0)
    broken.remove()
    assert all("weight" not in vars(module) for module in placed.modules())
    placed.load_state_dict(one.state_dict())
    assert step_of(placed, 0) == pytest.approx(step_of(one, 0), rel=TOLERANCE)


def test_an_interrupted_forward_leaves_nothing_behind(tmp_path: Path) -> None:
    one, placed = tower(), tower()
    for layer in placed[3:]:
        layer.to("meta")
    place(placed, {"": "meta", "2": "cpu", "1": "disk", "0": "cpu"}, offload_folder=tmp_path)
    x = torch.randn(4, 20, dtype=torch.float64)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for number in (1, 2):
        interrupted = placed[number].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            placed(x)
        interrupted.remove()
        # torch's stacks of modes and hooks are as before.
        assert torch.overrides._get_current_function_mode_stack() == []
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    assert placed(x).is_meta
    assert torch.equal(placed[1](placed[0](x)), one[1](one[0](x)))


def test_a_layer_after_an_interrupt_sees_what_it_holds(tmp_path: Path) -> None:
    one, placed = Block(3).double(), nn.Sequential(Block(3).double(), nn.Linear(3, 3).double())
    placed[0].load_state_dict(one.state_dict())
    place(placed.eval(), {"": "disk"}, offload_folder=tmp_path)
    x = torch.randn(4, 3, dtype=torch.float64)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    # Once in the block, once in a layer that is called without it; what is fetched ahead is of before, too.
    for interrupted in (placed[1], placed[0].down):
        removed = interrupted.register_forward_pre_hook(interrupt)
        for called in (placed, interrupted):
            with pytest.raises(KeyboardInterrupt):
                called(x if called is not placed[0].down else torch.ones(1, 6, dtype=torch.float64))
        removed.remove()
    with torch.no_grad():
        for parameter in (*placed[0].parameters(), *one.parameters()):
            parameter.mul_(2)
        assert torch.equal(placed[0].down.weight, one.down.weight)
        assert torch.equal(placed[0](x), one.eval()(x))


def _assigned(model: Net) -> nn.Module:
    with torch.no_grad():
        state = {key: value + 1 for key, value in net().state_dict().items()}
    model.load_state_dict(state, assign=True)
    return model


def _tied(model: Net) -> nn.Module:
    model.blocks[1].up.weight = model.blocks[2].up.weight
    model.head.weight = nn.Parameter(torch.ones_like(model.head.weight))
    model.blocks[0].down.bias = None
    return model


class Functional(nn.Module):
    def __init__(self, model: Net) -> None:
        super().__init__()
        self.model = model
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = {name: self.scale * parameter for name, parameter in self.model.named_parameters()}
        return torch.func.functional_call(self.model, weights, (x,))


@pytest.mark.parametrize("replaced", [_assigned, _tied, Functional])
def test_parameters_that_are_replaced_later_are_used(replaced: Any, tmp_path: Path) -> None:
    one, placed = (replaced(model) for model in (net(), place(net(), {"": "disk"}, offload_folder=tmp_path)))
    for _ in range(2):
        assert step_of(placed, 0) == pytest.approx(step_of(one, 0), rel=TOLERANCE)
    for (name, left), right in zip(placed.named_parameters(), one.parameters(), strict=True):
        assert torch.allclose(left.grad, right.grad, rtol=1e-9, atol=1e-12), name


def test_a_parameter_replaced_while_its_block_runs(tmp_path: Path) -> None:
    class Faster(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(self.up, {"weight": 2 * self.up.weight}, (x,))

    placed = place(nn.Sequential(Faster(2)), {"": "disk"}, offload_folder=tmp_path)
    with pytest.raises(
        ConfigurationError, match=r"weight of a Linear was replaced while 0, whose weights are fetched, was running"
    ):
        placed(torch.ones(1, 2))


def test_a_weight_changed_before_backward_is_noticed(tmp_path: Path) -> None:
    model = place(tower(2), {"": "disk"}, offload_folder=tmp_path)
    loss = model(torch.randn(4, 20, dtype=torch.float64, requires_grad=True)).sum()
    with torch.no_grad():
        model[1].weight.mul_(2)
    with pytest.raises(RankwiseError, match="changed in place between forward and backward"):
        loss.backward()
