# SPDX-License-Identifier: Apache-2.0
"""Modules as they are sent to servers: by value, without their tensors."""

from __future__ import annotations

import pickle
import threading
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from rankwise.auto.shipping import dumped, dumped_tree, loaded, loaded_tree
from rankwise.torch_private.tensors import tree_flatten, tree_unflatten


class Pair(NamedTuple):
    x: int
    y: list[int]


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.tied = self.layer.weight
        self.register_buffer("scale", torch.ones(2))
        self.held = [self.layer]
        self.factor = 2.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.held[0](x) * self.scale * self.factor


def _sent(module: nn.Module) -> nn.Module:
    """Send a module, with copies of its tensors on the other side."""
    tensors = [*module.parameters(), *module.buffers()]
    numbers = {id(one): number for number, one in enumerate(tensors)}
    data = dumped(module, lambda one: numbers.get(id(one)))
    copies = [
        nn.Parameter(one.detach().clone()) if isinstance(one, nn.Parameter) else one.detach().clone() for one in tensors
    ]
    return loaded(data, copies.__getitem__)  # type: ignore[no-any-return]


def test_a_module_keeps_what_is_shared_within_it() -> None:
    module, x = Own(), torch.randn(4, 3)
    found = _sent(module)
    assert found is not module
    assert found.held[0] is found.layer
    assert found.tied is found.layer.weight
    assert found.layer.weight is not module.layer.weight
    assert torch.equal(found(x), module(x))


def test_tensors_are_not_part_of_what_is_sent() -> None:
    module = nn.Linear(1000, 1000)
    numbers = {id(one): number for number, one in enumerate(module.parameters())}
    assert len(dumped(module, lambda one: numbers.get(id(one)))) < 10_000


def test_a_parametrized_module_is_sent_though_torch_refuses_to_pickle_it() -> None:
    module, x = parametrizations.weight_norm(nn.Linear(3, 2)), torch.randn(4, 3)
    with pytest.raises(RuntimeError):
        pickle.dumps(module)
    assert torch.equal(_sent(module)(x), module(x))


def test_what_cannot_be_pickled_raises() -> None:
    module = Own()
    module.factor = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(TypeError, match="cannot pickle"):
        _sent(module)


def test_the_structure_of_arguments_keeps_classes_of_the_script() -> None:
    arguments = ((Pair(1, [2, 3]),), {"mask": None})
    leaves, tree = tree_flatten(arguments)
    assert tree_unflatten(leaves, loaded_tree(dumped_tree(tree))) == arguments
