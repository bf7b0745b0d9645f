# SPDX-License-Identifier: Apache-2.0
"""Facts about single nodes of an autograd graph, between a loss and the outputs of models."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rankwise.parallel.loss.operations import PASSING, operation_of
from rankwise.torch_private.graph import metadata_of, saved, shape_of

if TYPE_CHECKING:
    from torch.autograd.graph import Node

    from rankwise.torch_private.graph import Edge

MARK = "rankwise: output of model"
"""The key in a node's metadata that holds the number of the model whose output it gave."""


def inputs_of(node: Node) -> list[Edge]:
    """Return where the gradient of a node goes on to."""
    return [(one, number) for one, number in node.next_functions if one is not None]


def dims_of(node: Node, num_dims: int) -> frozenset[int]:
    """Return the dims that an operation acts along; all of them where it names none."""
    dims = saved(node, "dim")
    everything = frozenset(range(max(num_dims, 1)))
    if dims is None or dims == ():
        return everything
    listed = dims if isinstance(dims, tuple) else (dims,)
    # What is negative in C++ comes as 2**64 less that.
    return frozenset((one - 2**64 if one >= 2**63 else one) % max(num_dims, 1) for one in listed)


def is_python_number(value: torch.Tensor) -> bool:
    """Return whether a tensor of no dims stands for a Python number, which is weak when dtypes meet."""
    small = torch.ones((), dtype=torch.float16 if value.is_floating_point() else torch.int8)
    return torch.result_type(small, value) != value.dtype


def is_parameter(node: Node) -> bool:
    """Return whether a node is a parameter, perhaps transposed or cast: the same on every rank."""
    while operation_of(node) in PASSING and (inputs := inputs_of(node)):
        node = inputs[0][0]
    return operation_of(node) == "AccumulateGrad"


def is_of_one_parameter(edge: Edge) -> bool:
    """Return whether only a parameter, changed element by element, is reduced: weight decay written into the loss."""
    shape, node = shape_of(edge), edge[0]
    while operation_of(node) != "AccumulateGrad":
        inputs = inputs_of(node)
        if len({one[0] for one in inputs}) != 1 or shape_of(inputs[0]) != shape or MARK in metadata_of(node):
            return False
        node = inputs[0][0]
    return True


def is_all_masked(node: Node) -> bool:
    """Return whether a mask leaves nothing of what is about to be reduced."""
    name = operation_of(node)
    if name == "Where":
        condition = saved(node, "condition")
        return isinstance(condition, torch.Tensor) and not bool(condition.any())
    if name == "Mul" and len(inputs_of(node)) == 1:
        factors = [one for one in (saved(node, "other"), saved(node, "self")) if isinstance(one, torch.Tensor)]
        return any(not bool(one.any()) for one in factors)
    return False
