# SPDX-License-Identifier: Apache-2.0
"""Reads a loss as a sum of terms, each a mean or a sum over this rank's samples.

Walks the graph from the loss to the marked outputs. Knows no other rank. In order: what the reductions on the way make
of a loss; the walk.

Terms are created in every step, among work that empties the processor's caches: named tuples are created several times
as fast as dataclasses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from rankwise.comm.collectives.data_movement import WholeBatch
from rankwise.replicate.loss.graph import (
    ADDING,
    CHOOSING,
    JOINING,
    MARK,
    MIXED,
    PASSING,
    PRODUCTS,
    REDUCING,
    SCALING,
    SHAPES,
    LossReduction,
    all_dims,
    amount_of,
    coupling_at,
    dims_of,
    inputs_of,
    is_of_parameters,
    is_python_number,
    is_whole_batch,
    leads_to_whole_batch,
    lets_data_in,
    loss_function_of,
    masks_of,
    nodes_from,
    operation_of,
    reduction_of,
)
from rankwise.torch_private.autograd import metadata_of, saved, shape_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from torch.autograd.graph import Node

    from rankwise.comm.backends.protocol import Amount
    from rankwise.replicate.loss.graph import ForwardCall
    from rankwise.torch_private.autograd import Edge


FARTHEST_NODES = 256
"""How far to look for coupled samples: a loss computed inside forward has the whole model below it."""
FARTHEST_IN_WHOLE = 16 * FARTHEST_NODES
"""The same where a loss is computed from the whole batch, from its outputs on."""
TermKind = Literal["mean", "sum", "same", "unknown"]


class Term(NamedTuple):
    """One reduction of a loss."""

    kind: TermKind
    """``same``: of parameters alone, the same on every rank. ``unknown``: neither a mean nor a sum over samples."""
    operation: str
    """The operation of the reduction, or the one that makes the term unknown."""
    node: Node
    """The node whose gradient scales this term and no other."""
    amount: Amount = 1.0
    """The number the mean is over, times the numbers that divide it; zero if this rank has nothing of the term."""
    num_rows: int = 0
    """Size of the first dim of the reduced tensor."""
    divisor: float = 0.0
    """The Python number that divides the term: one that is a size of the reduced tensor, else their product, or 0."""
    is_share: bool = False
    """Whether the divisor is a size of the reduced tensor, as the number of this rank's samples is."""
    is_odd: bool = False
    """Whether it is scaled by a number that may make a mean a sum, or a sum a mean."""
    per_row: float = 0.0
    """How many elements of each row a mean is over, if sizes alone decide it; else 0."""
    scales: tuple[float, ...] = ()
    """The Python numbers that scale it, but for those that are sizes."""
    has_constants: bool = False
    """Whether Python numbers scale it, which may differ between ranks."""


class GraphPath(NamedTuple):
    """The operations between the loss and the place that was reached."""

    reductions: tuple[LossReduction, ...] = ()
    by_python: tuple[float, ...] = ()
    """Python numbers divided by."""
    times_python: tuple[float, ...] = ()
    by_data: tuple[Amount, ...] = ()
    """Values of tensors divided by."""
    by_parameters: Node | None = None
    """The outermost product with a value of parameters, whose gradient depends on the terms below."""

    def deciding(self) -> LossReduction | None:
        """Return the reduction that runs first of those over samples."""
        for one in reversed(self.reductions):
            if 0 in one.dims:
                return one
        return None

    def through(self, reduction: LossReduction) -> GraphPath:
        """Return the path from beyond a reduction."""
        return GraphPath((*self.reductions, reduction), *self[1:])


def scaled(path: GraphPath, factor: torch.Tensor | float, *, is_division: bool) -> GraphPath:
    """Return the path from beyond a factor or a divisor."""
    if not isinstance(factor, torch.Tensor) or is_python_number(factor):
        value = float(factor)
        if is_division:
            return path._replace(by_python=(*path.by_python, value))
        return path._replace(times_python=(*path.times_python, value))
    # A factor in a tensor is a scaler's, the same on every rank; a divisor in a tensor is what a mean is over.
    return path._replace(by_data=(*path.by_data, amount_of(factor))) if is_division else path


def term_of(path: GraphPath, deciding: LossReduction, edge: Edge, in_batch: Collection[int] = ()) -> Term:
    """Return the term at the end of a path from the loss to the reduced ``edge``, by its reduction over samples.

    Args:
        path: from the loss.
        deciding: the reduction over samples.
        edge: what is reduced.
        in_batch: numbers of samples of this rank that are no size of what is reduced: of parts of a batch, of tokens.
    """
    rows = path.reductions[-1].shape
    divisor = math.prod(path.by_python)
    counted = math.prod(map(attrgetter("amount"), path.reductions)) * abs(math.prod(path.by_data))
    factor = abs(math.prod(path.times_python))
    num_rows = rows[0] if rows else 1
    has_constants = bool(path.by_python or path.times_python)
    sizes = {num_rows * one for one in (1, *rows[1:], math.prod(rows[1:]))} if has_constants else set[int]()
    sizes.update(in_batch)
    is_nothing = math.prod(rows) == 0
    if is_nothing and has_constants:
        sizes.add(1)  # as in max(len(x), 1)
    kind: TermKind = "mean" if deciding.kind == "mean" or path.by_data else "sum"
    shares = sizes.intersection(map(abs, path.by_python))
    if kind == "mean":
        is_odd = factor > 1 and factor in {num_rows, *in_batch}
    else:
        is_odd = any(_is_reciprocal(one, sizes) for one in path.times_python)
    per_row, scales = _of_each_row(path, kind, counted)
    # A loss times zero, or times NaN, is still a mean over the same number.
    amount = counted * abs(divisor) / (factor if math.isfinite(factor) and factor else 1.0)
    # max(mask.sum(), 1) is 1 if the mask is empty.
    masks = masks_of(edge[0]) if path.by_data else []
    if isinstance(amount, torch.Tensor):
        is_something = torch.isfinite(amount)
        for mask in masks:
            is_something = is_something & ((math.prod(path.by_data) != 1.0) | mask.any())
        amount = torch.where(is_something, amount, 0.0)
    elif not math.isfinite(amount) or (
        masks and math.prod(path.by_data) == 1.0 and not all(bool(one.any()) for one in masks)
    ):
        amount = 0.0
    of_part = shares.intersection(in_batch) - {num_rows} if kind == "sum" else set[int]()
    if of_part:
        # A part of a batch counts with the batch's samples, also where nothing is in it.
        num_rows, per_row = max(num_rows, *map(int, of_part)), 0.0
    elif is_nothing:
        amount = 0.0
    return Term(
        kind,
        operation_of(deciding.node),
        path.by_parameters or deciding.node,
        amount,
        num_rows,
        divisor=max(shares, default=abs(divisor) if path.by_python else 0.0),
        is_share=bool(shares),
        is_odd=is_odd,
        per_row=per_row,
        scales=scales,
        has_constants=has_constants,
    )


def _of_each_row(path: GraphPath, kind: TermKind, counted: Amount) -> tuple[float, tuple[float, ...]]:
    """Return how many elements of each row a term is a mean over, and the Python numbers that are no sizes.

    Zero elements if values decide: masks, weights of classes, ignored targets.
    """
    shape = path.reductions[-1].shape
    if len(shape) < 2 or path.by_data or any(map(attrgetter("is_weighted"), path.reductions)):  # noqa: PLR2004
        return 0.0, ()
    num_rows, sizes = max(shape[0], 1), {*shape[1:], math.prod(shape[1:])}
    counted = float(counted)
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


def are_of_single_samples(terms: Sequence[Term], num_samples: int) -> bool:
    """Return whether each term is of one row of a tensor with ``num_samples`` rows, as in a loop over samples."""
    return len(terms) >= num_samples > 0 and all(_picks_a_row(term.node, num_samples) for term in terms)


def _picks_a_row(start: Node, num_rows: int) -> bool:
    return any(
        operation_of(node) in CHOOSING and saved(node, "dim") == 0 and shape_of(inputs_of(node)[0])[0] == num_rows
        for node in nodes_from(start, FARTHEST_NODES)
    )


class Lead(Enum):
    """The kind of node that a node of the graph leads to."""

    NOWHERE = 0
    PARAMETERS = 1
    OUTPUT = 2


class LossModel:
    """A model whose outputs a loss may come from."""

    def __init__(self, number: int, parameters: Iterable[torch.Tensor]) -> None:
        self.number = number
        """The same on every rank."""
        self._ids = set(map(id, parameters))

    def owns(self, variable: object) -> bool:
        """Return whether something is a parameter of the model."""
        return id(variable) in self._ids

    def own(self, parameters: Iterable[torch.Tensor]) -> None:
        """Count more tensors as parameters of the model: they replace its parameters in the graph."""
        self._ids.update(map(id, parameters))


@dataclass(slots=True)
class LossReader:
    """Reads one loss, which may have several roots."""

    models: Sequence[LossModel]
    """Whose samples the terms are over."""
    num_given: Callable[[], int] = lambda: 0
    """Returns how many samples a loader gave this rank; 0 if none did."""
    terms: list[Term] = field(default_factory=list)
    calls: dict[int, ForwardCall | None] = field(default_factory=dict)
    """By number of the model, the call whose outputs the terms come from first, of those that have samples if some do;
    ``None`` where they come from its parameters alone."""
    unlike: dict[int, tuple[ForwardCall, ForwardCall]] = field(default_factory=dict)
    """By number of the model, two of its calls whose numbers of samples differ, or are on a device."""
    has_others: bool = False
    """Whether there are samples that come from no call: by a method, or through the gradient of an output."""
    _leads: dict[Node, Lead] = field(default_factory=dict)
    _shapes: dict[Edge, tuple[int, ...]] = field(default_factory=dict)
    """Shapes that are known: asking a node takes as long as everything else."""

    @property
    def is_empty(self) -> bool | None:
        """Whether there are no samples at all; ``None`` if no call shows it."""
        found: bool | None = None
        for call in self.calls.values():
            if call is not None:
                if not call.is_empty or self.has_others:
                    return False
                found = True
        return found

    def read(self, root: torch.Tensor) -> None:
        """Note the terms of one root of backward."""
        if root.grad_fn is not None and not self._read_at_once(root.grad_fn):
            edge = (root.grad_fn, root.output_nr)
            self._shapes[edge] = root.shape
            self._read(edge, GraphPath())

    def _read_at_once(self, node: Node) -> bool:
        """Note a loss function of an output of a model, as most losses are; return whether it is one.

        :meth:`_read` finds the same, in three times as long.
        """
        inputs = inputs_of(node)
        if len(inputs) != 1 or WholeBatch.is_used or MARK in metadata_of(node) or MARK not in metadata_of(inputs[0][0]):
            return False
        kind = saved(node, "reduction")
        if kind not in (1, 2):
            return False
        self._is_output(inputs[0][0])
        reduction = loss_function_of(node, kind, self._shape(inputs[0]))
        self.terms.append(term_of(GraphPath((reduction,)), reduction, inputs[0]))
        return True

    def _read(self, edge: Edge, path: GraphPath) -> None:
        node = edge[0]
        inputs, is_output = inputs_of(node), self._is_output(node)
        leads = [self._lead(one[0]) for one in inputs]
        live = [one for one, lead in zip(inputs, leads, strict=True) if lead is not Lead.NOWHERE]
        is_of_samples = is_output or Lead.OUTPUT in leads
        if not (live or is_output):
            return
        if WholeBatch.is_used and self._shape(edge) == () and self._is_of_whole_batch(node):
            # The same on each rank that has samples: its gradients are averaged over these.
            self.terms.append(Term("mean", "whole_batch", path.by_parameters or node))
        elif not is_of_samples and self._shape(edge) == () and is_of_parameters(node):
            self.terms.append(Term("same", operation_of(node), node))
        elif is_output and self._shape(edge) != ():
            self._stop(edge, path, "no reduction")
        elif (kind := saved(node, "reduction")) in (1, 2):
            # Others than the first: targets that are computed by the model.
            others = [self._note_marks(one[0]) for one in live if one != inputs[0]] if WholeBatch.is_used else []
            mixed = MIXED if MIXED in others else None
            self._end(inputs[0], path.through(loss_function_of(node, kind, self._shape(inputs[0]))), mixed)
        else:
            self._read_operation(edge, live, path)

    def _read_operation(self, edge: Edge, live: list[Edge], path: GraphPath) -> None:
        node, shape = edge[0], self._shape(edge)
        name = operation_of(node)
        if name in REDUCING:
            below = inputs_of(node)[0]
            shape_before = saved(node, "self_sizes")
            if shape_before is not None:
                self._shapes[below] = shape_before
            self._read(below, path.through(reduction_of(node, shape, self._shape(below))))
        elif self._splits(name, shape, live, path):
            for one in live:
                self._read(one, path)
        elif name in PASSING and len(live) == 1:
            self._read(live[0], path)
        elif name in SCALING:
            self._read_scaled(edge, live, path)
        elif name in PRODUCTS and not path.reductions and math.prod(shape) == 1:
            # A sum over the products of two vectors, as of torch.dot and torch.einsum.
            length = math.prod(self._shape(live[0]))
            total = LossReduction("sum", node, (length,), all_dims(1), 1.0)
            coupling = [found for one in live[1:] if (found := self._note_marks(one[0]))]
            self._end(live[0], path.through(total), next(iter(coupling), None))
        else:
            self._stop(edge, path, name)

    def _read_scaled(self, edge: Edge, live: list[Edge], path: GraphPath) -> None:
        node, shape = edge[0], self._shape(edge)
        name, is_scalar = operation_of(node), shape == ()
        if is_scalar and len(live) > 1:
            # A loss times exp(-s) of a learned s: one factor, the same on every rank.
            of_samples = [one for one in live if not is_of_parameters(one[0])]
            if len(of_samples) == 1 and (name == "Mul" or of_samples[0] == inputs_of(node)[0]):
                self._read(of_samples[0], path._replace(by_parameters=path.by_parameters or node))
                return
        if len(live) > 1:
            self._stop(edge, path, f"{name} of two reductions")
            return
        inputs = inputs_of(node)
        if name == "Div" and (not inputs or live[0] != inputs[0]):
            self._stop(edge, path, "Div by an output")
            return
        is_of_shape = self._shape(live[0]) == shape
        factor = saved(node, "other") if is_of_shape else None
        if factor is None and name == "Mul" and (is_scalar or is_of_shape):
            factor = saved(node, "self")
        if isinstance(factor, torch.Tensor) and factor.dim():
            if path.reductions and self._is_reduced(live[0]):
                if name == "Div" and self._is_summed(live[0]) and bool((factor == factor.round()).all()):
                    # A mean for each output, over a number of its own.
                    self._end(edge, path, "Div of a sum by counts")
                else:
                    self._read(live[0], path)
            else:
                self._stop(edge, path, name)
            return
        if factor is None:
            # Autograd does not save the factor if it is a Python number of some kinds, or needs no gradient.
            self._stop(edge, path, name)
            return
        self._read(live[0], scaled(path, factor, is_division=name == "Div"))

    def _is_of_whole_batch(self, start: Node) -> bool:
        """Return whether a value is computed from all ranks' samples, and parameters, alone; note their outputs."""
        nodes = list(nodes_from(start, FARTHEST_IN_WHOLE, is_whole_batch))
        wholes = list(filter(is_whole_batch, nodes))
        others = [node for node in nodes if not is_whole_batch(node)]
        if not wholes or len(others) >= FARTHEST_IN_WHOLE:
            return False
        if any(MARK in metadata_of(node) for node in others if node is not start):
            return False
        # Samples of this rank enter inside the model, as in gradients of its parameters.
        if not all(map(leads_to_whole_batch, filter(lets_data_in, others))):
            return False
        for one in wholes:
            self._note_marks(one)
        return True

    def _is_reduced(self, edge: Edge) -> bool:
        """Return whether a value is a mean or a sum over the first dim, or several of them, as means of classes are."""
        node = edge[0]
        name, inputs = operation_of(node), inputs_of(node)
        if name in REDUCING:
            return 0 in dims_of(node, len(saved(node, "self_sizes") or self._shape(inputs[0])))
        if name == "Stack":
            return all(self._shape(one) == () for one in inputs)
        return name in PASSING and len(inputs) == 1 and self._is_reduced(inputs[0])

    def _is_summed(self, edge: Edge) -> bool:
        """Return whether what is a mean or a sum over the first dim is a sum."""
        node = edge[0]
        name, inputs = operation_of(node), inputs_of(node)
        return name == "Sum" or (name in PASSING and len(inputs) == 1 and self._is_summed(inputs[0]))

    def _in_batch(self, edge: Edge) -> set[int]:
        """Return numbers of samples of this rank: the rows of the calls that a value is computed from, and a loader's.

        Not one from a loader, which is also what a batch without samples is divided by: max(len(x), 1).
        """
        found = {self.num_given()} - {1}
        for node in nodes_from(edge[0], FARTHEST_NODES, self._is_output):
            call: ForwardCall | None = metadata_of(node).get(MARK)
            if call is not None and call.sizes:
                found.add(call.sizes[0])
        return found - {0}

    def _splits(self, name: str, shape: tuple[int, ...], live: list[Edge], path: GraphPath) -> bool:
        """Return whether each input of a node is a term of its own, by dims, which do not depend on samples."""
        if name in JOINING:
            return all(math.prod(self._shape(one)) == 1 and len(self._shape(one)) < 2 for one in live)  # noqa: PLR2004
        return name in ADDING and (shape == () or (not path.reductions and math.prod(shape) == 1))

    def _stop(self, edge: Edge, path: GraphPath, operation: str) -> None:
        """Note the term at an operation that is not read, which is unknown if nothing was reduced before."""
        self._end(edge, path, operation if self._shape(edge) == () or not path.reductions else None)

    def _end(self, edge: Edge, path: GraphPath, unknown: str | None) -> None:
        """Note the term whose reductions are all on the path."""
        coupling, deciding = self._note_marks(edge[0]), path.deciding()
        if not self._is_of_outputs(edge[0]) and math.prod(self._shape(edge)):
            self.has_others = True
        if unknown is not None:
            term = Term("unknown", unknown, path.reductions[-1].node if path.reductions else edge[0])
        elif deciding is None:
            term = Term("unknown", "a reduction that keeps the first dim", edge[0])
        elif coupling is not None:
            term = Term("unknown", coupling, deciding.node)
        else:
            term = term_of(path, deciding, edge, self._in_batch(edge) if path.by_python or path.times_python else ())
        self.terms.append(term)

    def _note_marks(self, start: Node) -> str | None:
        """Note the outputs below a node; return the operation on the way that couples samples, or ``None``."""
        found = None
        for node in nodes_from(start, FARTHEST_NODES, self._is_output):
            if MARK in metadata_of(node):
                continue
            owner = self._owner(node)
            if owner is not None:
                self.calls.setdefault(owner, None)
            found = found or coupling_at(node, self._shape, self._is_of_outputs)
        return found

    def _is_of_outputs(self, node: Node) -> bool:
        """Return whether a value is computed from outputs of models."""
        return self._lead(node) is Lead.OUTPUT

    def _is_output(self, node: Node) -> bool:
        call: ForwardCall | None = metadata_of(node).get(MARK)
        if call is None:
            return False
        known = self.calls.get(call.model)
        if known is not None and known is not call:
            amounts = known.num_samples, call.num_samples
            if any(isinstance(one, torch.Tensor) for one in amounts) or amounts[0] != amounts[1]:
                self.unlike.setdefault(call.model, (known, call))
        if known is None or known.is_empty:
            self.calls[call.model] = call
        return True

    def _shape(self, edge: Edge) -> tuple[int, ...]:
        found = self._shapes.get(edge)
        if found is None:
            node, number = edge
            found = self._shapes[edge] = metadata_of(node).get(SHAPES, {}).get(number) or shape_of(edge)
        return found

    def _owner(self, node: Node) -> int | None:
        """Return the number of the model whose parameter's gradient a node accumulates."""
        variable = getattr(node, "variable", None)
        if variable is None:
            return None
        return next((model.number for model in self.models if model.owns(variable)), None)

    def _lead(self, start: Node) -> Lead:
        """Return what lies below a node: an output of a model takes precedence."""
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
                # The same nodes lie below it and below the start.
                chain.append(node)
            seen.add(node)
            if found is Lead.NOWHERE and self._owner(node) is not None:
                found = Lead.PARAMETERS
            stack += [one[0] for one in inputs_of(node)]
        is_cut_short = stack and found is not Lead.OUTPUT
        self._leads.update(dict.fromkeys(chain[:1] if is_cut_short else chain, found))
        return found
