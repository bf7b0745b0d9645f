# SPDX-License-Identifier: Apache-2.0
"""What the reductions between a loss and an output of a model make of it: a term, a mean or a sum. Values only.

Made in every step, among work that empties the caches of the processor: named tuples are made several times as fast as
dataclasses.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from rankwise.parallel.loss.nodes import is_all_masked, is_python_number
from rankwise.parallel.loss.operations import operation_of

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch.autograd.graph import Node

    from rankwise.torch_private.graph import Edge

Kind = Literal["mean", "sum", "same", "unknown"]


class Term(NamedTuple):
    """One reduction of a loss."""

    kind: Kind
    """``same``: of parameters alone, the same on every rank. ``unknown``: neither a mean nor a sum over samples."""
    operation: str
    """The operation: of the reduction, or that makes the term unknown."""
    node: Node
    """Whose gradient scales this term and no other."""
    amount: float = 1.0
    """What the mean is over, times the numbers that it is divided by; zero where this rank has nothing of it."""
    num_rows: int = 0
    """Size of the first dim of what is reduced."""
    divisor: float = 0.0
    """The Python number that divides the term: the one that is a size of what is reduced, else their product, or 0."""
    is_share: bool = False
    """Whether it is a size of what is reduced, as the number of this rank's samples is."""
    is_odd: bool = False
    """Whether it is scaled by a number that may make a mean a sum, or a sum a mean."""
    per_row: float = 0.0
    """Over how many elements of each row a mean is, where nothing but sizes says so; else 0."""
    scales: tuple[float, ...] = ()
    """The Python numbers that scale it, but for those that are sizes."""
    has_constants: bool = False
    """Whether Python numbers scale it, which may differ between ranks."""


class Reduction(NamedTuple):
    """A mean or a sum over dims of what a loss is computed from."""

    kind: Literal["mean", "sum"]
    node: Node
    shape: tuple[int, ...]
    dims: frozenset[int]
    amount: float
    is_weighted: bool = False
    """Whether it says itself what it is over, in a tensor."""


class Path(NamedTuple):
    """What lies between the loss and the place that was reached."""

    reductions: tuple[Reduction, ...] = ()
    by_python: tuple[float, ...] = ()
    """Python numbers divided by."""
    times_python: tuple[float, ...] = ()
    by_data: tuple[float, ...] = ()
    """Values of tensors divided by."""

    def deciding(self) -> Reduction | None:
        """Return the reduction that is done first of those that let samples see one another."""
        for one in reversed(self.reductions):
            if 0 in one.dims:
                return one
        return None

    def through(self, reduction: Reduction) -> Path:
        """Return the path from beyond a reduction."""
        return Path((*self.reductions, reduction), *self[1:])


def scaled(path: Path, factor: torch.Tensor | float, *, is_division: bool) -> Path:
    """Return the path from beyond a factor or a divisor."""
    if not isinstance(factor, torch.Tensor) or is_python_number(factor):
        value = float(factor)
        if is_division:
            return path._replace(by_python=(*path.by_python, value))
        return path._replace(times_python=(*path.times_python, value))
    # A factor that is data is a scaler's, the same on every rank; a divisor is what a mean is over.
    return path._replace(by_data=(*path.by_data, float(factor))) if is_division else path


def term_of(path: Path, deciding: Reduction, edge: Edge) -> Term:
    """Return the term at the end of a path.

    Args:
        path: from the loss on.
        deciding: the reduction on it that lets samples see one another.
        edge: what is reduced.
    """
    rows = path.reductions[-1].shape
    divisor = math.prod(path.by_python)
    counted = math.prod(one.amount for one in path.reductions) * abs(math.prod(path.by_data))
    operation = operation_of(deciding.node)
    factor = abs(math.prod(path.times_python))
    num_rows = rows[0] if rows else 1
    has_constants = bool(path.by_python or path.times_python)
    sizes = {num_rows * one for one in (1, *rows[1:], math.prod(rows[1:]))} if has_constants else ()
    kind: Kind = "mean" if deciding.kind == "mean" or path.by_data else "sum"
    shares = [abs(one) for one in path.by_python if abs(one) in sizes]
    if kind == "mean":
        is_odd = num_rows > 1 and factor == num_rows
    else:
        is_odd = any(_is_reciprocal(one, sizes) for one in path.times_python)
    per_row, scales = _of_each_row(path, kind, counted)
    # A loss times zero, or times NaN, is still a mean over as much.
    amount = counted * abs(divisor) / (factor if math.isfinite(factor) and factor else 1.0)
    if path.by_data and math.prod(path.by_data) == 1.0 and is_all_masked(edge[0]):
        # max(mask.sum(), 1) says 1 where the mask is empty.
        amount = 0.0
    if not math.isfinite(amount):
        amount = 0.0
    return Term(
        kind,
        operation,
        deciding.node,
        amount,
        num_rows,
        divisor=max(shares, default=abs(divisor) if path.by_python else 0.0),
        is_share=bool(shares),
        is_odd=is_odd,
        per_row=per_row,
        scales=scales,
        has_constants=has_constants,
    )


def _of_each_row(path: Path, kind: Kind, counted: float) -> tuple[float, tuple[float, ...]]:
    """Return over how many elements of each row a term is a mean, and the Python numbers that are no sizes.

    Zero elements where values decide: masks, weights of classes, what is ignored.
    """
    shape = path.reductions[-1].shape
    if len(shape) < 2 or path.by_data or any(one.is_weighted for one in path.reductions):  # noqa: PLR2004
        return 0.0, ()
    num_rows, sizes = max(shape[0], 1), {*shape[1:], math.prod(shape[1:])}
    is_over_rows = kind == "mean"
    elements = counted / num_rows if is_over_rows else counted
    scales = list(path.times_python)
    for value in map(abs, path.by_python):
        if not is_over_rows and value / num_rows in (1, *sizes):
            elements *= value / num_rows
            is_over_rows = True
        elif value in sizes:
            elements *= value
        else:
            scales.append(1 / value if value else 0.0)
    return elements, tuple(scales)


def _is_reciprocal(value: float, sizes: Collection[int]) -> bool:
    return 0 < abs(value) < 0.5 and any(math.isclose(1 / abs(value), one, rel_tol=1e-12) for one in sizes)  # noqa: PLR2004
