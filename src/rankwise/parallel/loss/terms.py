# SPDX-License-Identifier: Apache-2.0
"""Reads a loss as a sum of terms, each a mean or a sum over this rank's samples.

Walks the graph from the loss to the outputs of the models it came from, which are marked. Knows no other rank and
changes nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

import torch

from rankwise.parallel.loss.nodes import (
    MARK,
    SHAPES,
    ForwardCall,
    all_dims,
    dims_of,
    inputs_of,
    is_of_parameters,
)
from rankwise.parallel.loss.operations import ADDING, COUPLING, PASSING, PRODUCTS, REDUCING, SCALING, operation_of
from rankwise.parallel.loss.reductions import Path, Reduction, Term, scaled, term_of
from rankwise.torch_private.graph import is_of_python, is_of_strategy, metadata_of, saved, shape_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.autograd.graph import Node

    from rankwise.torch_private.graph import Edge

FARTHEST_NODES = 256
"""How far to look for what couples samples: a loss computed inside of forward has the whole model below it."""


class Lead(Enum):
    """What a node of the graph leads to."""

    NOWHERE = 0
    PARAMETERS = 1
    OUTPUT = 2


class Model(Protocol):
    """A model whose outputs a loss may come from."""

    number: int

    def owns(self, variable: object) -> bool:
        """Return whether something is a parameter of the model."""
        ...


@dataclass(slots=True)
class Reader:
    """Reads one loss, which may have several roots."""

    models: Sequence[Model]
    """Whose samples the terms are over."""
    terms: list[Term] = field(default_factory=list)
    calls: dict[int, ForwardCall | None] = field(default_factory=dict)
    """By number of the model, the call whose outputs the terms come from first; ``None`` where they come from its
    parameters alone."""
    _leads: dict[Node, Lead] = field(default_factory=dict)
    _shapes: dict[Edge, tuple[int, ...]] = field(default_factory=dict)
    """As far as they are known: to ask a node takes as long as all the rest."""

    def read(self, root: torch.Tensor) -> None:
        """Note the terms of one root of backward."""
        if root.grad_fn is not None:
            edge = (root.grad_fn, root.output_nr)
            self._shapes[edge] = root.shape
            self._read(edge, Path())

    def _read(self, edge: Edge, path: Path) -> None:
        node = edge[0]
        inputs, is_output = inputs_of(node), self._is_output(node)
        live, is_of_samples = [], is_output
        for one in inputs:
            lead = self._lead(one[0])
            if lead is not Lead.NOWHERE:
                live.append(one)
            if lead is Lead.OUTPUT:
                is_of_samples = True
        if not (live or is_output):
            return
        if not is_of_samples and self._shape(edge) == () and is_of_parameters(node):
            self.terms.append(Term("same", operation_of(node), node))
        elif is_output and self._shape(edge) != ():
            self._end(edge, path, None if path.reductions else "no reduction")
        elif saved(node, "reduction") in (1, 2):
            self._end(inputs[0], path.through(_of_loss_function(node, self._shape(inputs[0]))), None)
        else:
            self._read_operation(edge, live, path)

    def _read_operation(self, edge: Edge, live: list[Edge], path: Path) -> None:
        node, shape = edge[0], self._shape(edge)
        name = operation_of(node)
        if name in REDUCING:
            below = inputs_of(node)[0]
            shape_before = saved(node, "self_sizes")
            if shape_before is not None:
                self._shapes[below] = shape_before
            self._read(below, path.through(_of_reduction(node, shape, self._shape(below))))
        elif self._splits(name, shape, live, path):
            for one in live:
                self._read(one, path)
        elif name in PASSING and len(live) == 1:
            self._read(live[0], path)
        elif name in SCALING:
            self._read_scaled(edge, live, path)
        else:
            self._end(edge, path, name if shape == () or not path.reductions else None)

    def _read_scaled(self, edge: Edge, live: list[Edge], path: Path) -> None:
        node, shape = edge[0], self._shape(edge)
        name, is_scalar = operation_of(node), shape == ()
        if len(live) > 1:
            self._end(edge, path, f"{name} of two reductions" if is_scalar or not path.reductions else None)
            return
        inputs = inputs_of(node)
        if name == "Div" and (not inputs or live[0] != inputs[0]):
            self._end(edge, path, "Div by an output" if is_scalar or not path.reductions else None)
            return
        factor = saved(node, "other") if self._shape(live[0]) == shape else None
        if factor is None and name == "Mul" and is_scalar:
            factor = saved(node, "self")
        if isinstance(factor, torch.Tensor) and factor.dim():
            self._end(edge, path, None if path.reductions else name)
            return
        if factor is None:
            # Nothing else is saved where the other factor is a Python number of some kinds, or needs no gradient.
            self._end(edge, path, name if is_scalar or not path.reductions else None)
            return
        self._read(live[0], scaled(path, factor, is_division=name == "Div"))

    def _splits(self, name: str, shape: tuple[int, ...], live: list[Edge], path: Path) -> bool:
        """Return whether each input of a node is a term of its own: told by dims, which do not depend on samples."""
        if name == "Stack":
            return all(self._shape(one) == () for one in live)
        return name in ADDING and (shape == () or (not path.reductions and math.prod(shape) == 1))

    def _end(self, edge: Edge, path: Path, unknown: str | None) -> None:
        """Note the term whose reductions are all on the path."""
        if unknown is not None:
            self.terms.append(Term("unknown", unknown, path.reductions[-1].node if path.reductions else edge[0]))
            self._note_marks(edge[0])
            return
        deciding = path.deciding()
        if deciding is None:
            self.terms.append(Term("unknown", "a reduction that keeps the first dim", edge[0]))
            self._note_marks(edge[0])
            return
        coupling = self._note_marks(edge[0])
        if coupling is not None:
            self.terms.append(Term("unknown", coupling, deciding.node))
            return
        self.terms.append(term_of(path, deciding, edge))

    def _note_marks(self, start: Node) -> str | None:
        """Note the outputs below a node; return what couples samples on the way, if anything does."""
        if self._is_output(start):
            return None
        found = None
        stack, seen = [start], set[Any]()
        while stack and len(seen) < FARTHEST_NODES:
            node = stack.pop()
            if node in seen or self._is_output(node):
                continue
            seen.add(node)
            owner = self._owner(node)
            if owner is not None:
                self.calls.setdefault(owner, None)
            found = found or self._couples(node)
            stack += [one[0] for one in inputs_of(node)]
        return found

    def _couples(self, node: Node) -> str | None:
        name, inputs = operation_of(node), inputs_of(node)
        if not inputs or name == "AccumulateGrad":
            return None
        if is_of_python(node) or name == "CompiledFunction":
            return None if is_of_strategy(node) else name
        # What a model, or a criterion, does with its parameters alone does not look at samples.
        if (name not in COUPLING and name not in PRODUCTS) or self._lead(node) is not Lead.OUTPUT:
            return None
        shape = self._shape(inputs[0])
        if name in COUPLING and 0 in dims_of(node, len(shape)):
            return f"{name} over the first dim"
        if name in PRODUCTS and len(inputs) > 1:
            from_data = [one for one in inputs if self._lead(one[0]) is Lead.OUTPUT]
            if len(from_data) > 1 and (len(shape) < 3 or shape[0] == 1):  # noqa: PLR2004 - batched ones have three
                return f"{name} of two outputs"
        return None

    def _is_output(self, node: Node) -> bool:
        call: ForwardCall | None = metadata_of(node).get(MARK)
        if call is None:
            return False
        self.calls[call.model] = self.calls.get(call.model) or call
        return True

    def _shape(self, edge: Edge) -> tuple[int, ...]:
        found = self._shapes.get(edge)
        if found is None:
            node, number = edge
            found = self._shapes[edge] = metadata_of(node).get(SHAPES, {}).get(number) or shape_of(edge)
        return found

    def _owner(self, node: Node) -> int | None:
        """Return the number of the model that a node adds up the gradient of a parameter of."""
        variable = getattr(node, "variable", None)
        if variable is None:
            return None
        return next((model.number for model in self.models if model.owns(variable)), None)

    def _lead(self, start: Node) -> Lead:
        """Return what lies below a node: an output of a model before all else."""
        if MARK in metadata_of(start):
            return Lead.OUTPUT
        known = self._leads.get(start)
        if known is not None:
            return known
        stack, seen, found = [start], set[Any](), Lead.NOWHERE
        chain: list[Node] = []
        while stack and len(seen) < FARTHEST_NODES:
            node = stack.pop()
            if node in seen:
                continue
            if MARK in metadata_of(node):
                found = Lead.OUTPUT
                break
            if not stack and len(chain) == len(seen):
                # Below it lies what lies below the start.
                chain.append(node)
            seen.add(node)
            if found is Lead.NOWHERE and self._owner(node) is not None:
                found = Lead.PARAMETERS
            stack += [one[0] for one in inputs_of(node)]
        is_cut_short = stack and found is not Lead.OUTPUT
        self._leads.update(dict.fromkeys(chain[:1] if is_cut_short else chain, found))
        return found


def _of_loss_function(node: Node, shape: tuple[int, ...]) -> Reduction:
    """Return the reduction that is a part of a loss function: its node says what it took the mean over."""
    total = saved(node, "total_weight")
    if saved(node, "reduction") != 1:
        return Reduction("sum", node, shape, all_dims(len(shape)), 1.0)
    amount = math.prod(shape) if total is None else float(total)
    return Reduction("mean", node, shape, all_dims(len(shape)), amount, total is not None)


def _of_reduction(node: Node, shape: tuple[int, ...], shape_before: tuple[int, ...]) -> Reduction:
    dims = dims_of(node, len(shape_before))
    if operation_of(node) != "Mean":
        return Reduction("sum", node, shape_before, dims, 1.0)
    return Reduction("mean", node, shape_before, dims, math.prod(shape_before) / max(math.prod(shape), 1))
