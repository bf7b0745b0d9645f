# SPDX-License-Identifier: Apache-2.0
"""Facts about single nodes of an autograd graph, between a loss and the outputs of models."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from rankwise.parallel.loss.operations import LOOKUPS, PRODUCTS, operation_of
from rankwise.torch_private.graph import is_of_python, saved

if TYPE_CHECKING:
    from torch.autograd.graph import Node

    from rankwise.torch_private.graph import Edge

MARK = "rankwise: output of model"
"""The key in a node's metadata that holds of which model, and which call of it, the node gave an output."""

SHAPES = "rankwise: shapes of outputs"
"""The key that holds the shapes of such outputs, by their numbers among what the node computed."""


@dataclass(frozen=True, slots=True)
class ForwardCall:
    """A forward call of a model."""

    model: int
    """Its number."""
    num_samples: float | None
    """What the call says its loss is a mean over, where it says so."""
    sizes: tuple[int, ...] = ()
    """Of the first tensor that it was given."""


def inputs_of(node: Node) -> list[Edge]:
    """Return the nodes that the gradient of a node is passed to, with which of their outputs it is of."""
    return [(one, number) for one, number in node.next_functions if one is not None]


@cache
def all_dims(num_dims: int) -> frozenset[int]:
    """Return the dims of a shape: of a number, which is reduced as a tensor of one element, too."""
    return frozenset(range(max(num_dims, 1)))


def dims_of(node: Node, num_dims: int) -> frozenset[int]:
    """Return the dims that an operation acts along; all of them where it names none."""
    dims = saved(node, "dim")
    if dims is None or dims == ():
        return all_dims(num_dims)
    listed = dims if isinstance(dims, tuple) else (dims,)
    # What is negative in C++ comes as 2**64 less that.
    return frozenset((one - 2**64 if one >= 2**63 else one) % max(num_dims, 1) for one in listed)


def is_python_number(value: torch.Tensor) -> bool:
    """Return whether a tensor of no dims stands for a Python number, which is weak when dtypes meet."""
    return torch.result_type(_small(value.is_floating_point()), value) != value.dtype


@cache
def _small(is_floating_point: bool) -> torch.Tensor:  # noqa: FBT001 - the key of a cache
    return torch.ones((), dtype=torch.float16 if is_floating_point else torch.int8, device="cpu")


def is_of_parameters(start: Node) -> bool:
    """Return whether nothing of the samples enters what is computed from parameters: a penalty, the same on all ranks.

    Samples need no gradient, so they are not in the graph: they enter where a product has only one factor there.
    """
    stack, seen = [start], set[Any]()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if is_of_python(node) or operation_of(node) in LOOKUPS:
            return False
        if operation_of(node) in PRODUCTS and any(one is None for one, _ in node.next_functions):
            return False
        stack += [one[0] for one in inputs_of(node)]
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
