# SPDX-License-Identifier: Apache-2.0
"""The autograd graph between a loss and the outputs of models: the marks on outputs, and facts of single nodes.

Knows no other rank and changes nothing but the marks. In order: the numbers that a loss is a mean over, which the marks
hold; the table of operations, by the names of their nodes; the marks; facts of nodes. What is not in the table acts on
each element by itself, or on dims whose numbers it saves.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from functools import cache, partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn

import torch

from rankwise.comm.collectives.data_movement import WholeBatch
from rankwise.errors import ConfigurationError
from rankwise.torch_private.autograd import function_of, is_of_python, metadata_of, saved
from rankwise.torch_private.tensors import sparse_values, tree_leaves
from rankwise.world.device.kinds import kind_named
from rankwise.world.device.streams import check_later

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from torch.autograd.graph import Node

    from rankwise.comm.backends.protocol import Amount
    from rankwise.torch_private.autograd import Edge

# -- numbers that a loss is a mean over ---------------------------------------------------------------


def amount_of(value: float | torch.Tensor) -> Amount:
    """Return a number as it is computed with: a Python number, or a tensor where that is on a device.

    Reading a value of a device makes the CPU wait for everything that the device has still to do.
    """
    if not isinstance(value, torch.Tensor) or value.device.type == "cpu":
        return float(value)
    dtype = torch.float64 if kind_named(value.device.type).has_float64 else torch.float32
    return value.detach().to(dtype).reshape(())


def is_python_number(value: torch.Tensor) -> bool:
    """Return whether a tensor of no dims stands for a Python number, which is weak in type promotion."""
    return torch.result_type(_small(value.is_floating_point()), value) != value.dtype


@cache
def _small(is_floating_point: bool) -> torch.Tensor:  # noqa: FBT001 - the key of a cache
    return torch.ones((), dtype=torch.float16 if is_floating_point else torch.int8, device="cpu")


def check_weight(weight: Amount, of: str, number: int) -> None:
    """Raise unless the number that a loss is a mean over is at least 0; later, if it is on a device.

    Args:
        weight: the number.
        of: what has it, for the error: a backward, or a micro-batch.
        number: of the step that uses it, for an error that is found later.
    """
    if isinstance(weight, torch.Tensor):
        check_later(~(torch.isfinite(weight) & (weight >= 0)), partial(_refuse_weight, weight, of, number))
    elif not (math.isfinite(weight) and weight >= 0):
        _refuse_weight(weight, of)


def _refuse_weight(weight: Amount, of: str, number: int | None = None) -> NoReturn:
    raise ConfigurationError(
        f"The weight of a {of} must be at least 0, got {float(weight)}.",
        where=None if number is None else f"found after step {number} of the model, which used it",
        do="give the number of samples or tokens that the loss averages over",
    )


def plain(amount: Amount) -> float:
    """Return a number for a message to other ranks; NaN for one that is on a device."""
    return math.nan if isinstance(amount, torch.Tensor) else amount


def is_zero(amount: Amount) -> bool:
    """Return whether a number is known to be zero: on a device none is."""
    return not isinstance(amount, torch.Tensor) and amount == 0.0


def ratio(amount: Amount, total: Amount) -> Amount:
    """Return ``amount / total``, and zero for a total of zero."""
    if isinstance(amount, torch.Tensor) or isinstance(total, torch.Tensor):
        found = amount / total
        return torch.where(torch.isfinite(found), found, 0.0)  # type: ignore[arg-type]
    return amount / total if total else 0.0


@torch.no_grad()
def multiply_(gradient: torch.Tensor, factor: Amount) -> torch.Tensor:
    """Multiply in place, and return it. A factor of zero leaves nothing of the gradient, not even a NaN."""
    if isinstance(factor, torch.Tensor):
        return (
            gradient.copy_(_product(gradient, factor)) if _is_half(gradient) else clear_(gradient.mul_(factor), factor)
        )
    if factor == 1.0:
        return gradient
    return gradient.mul_(factor) if factor else gradient.zero_()


def multiplied(gradient: torch.Tensor, factor: Amount) -> torch.Tensor:
    """Return a gradient times a factor. A factor of zero leaves nothing of the gradient, not even a NaN."""
    if isinstance(factor, torch.Tensor):
        return _product(gradient, factor)
    return gradient * factor if factor else torch.zeros_like(gradient)


def clear_(gradient: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Fill a gradient with zeros, in place, if a factor on its device is zero."""
    (sparse_values(gradient) if gradient.is_sparse else gradient).masked_fill_(factor == 0, 0.0)
    return gradient


def _product(gradient: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    # torch rounds a factor on a device to the gradient's dtype, but a Python number to float32 at most.
    wide = gradient.float() if _is_half(gradient) else gradient
    return clear_(wide * factor, factor).to(gradient.dtype)


def _is_half(gradient: torch.Tensor) -> bool:
    return gradient.dtype in (torch.bfloat16, torch.float16)


# -- operations and marks -------------------------------------------------------------------------------

MARK = "rankwise: output of model"
"""The key in a node's metadata of the forward call whose output the node computed."""
SHAPES = "rankwise: shapes of outputs"
"""The key of the shapes of such outputs, by their numbers among the outputs of the node."""

_NODE: Callable[[Any], Any] = itemgetter(0)
PASSING = frozenset(
    {
        "Alias",
        "Clone",
        "Contiguous",
        "Expand",
        "Neg",
        "Permute",
        "Reshape",
        "ReshapeAlias",
        "Select",
        "Slice",
        "Squeeze",
        "T",
        "ToCopy",
        "Transpose",
        "UnsafeView",
        "Unsqueeze",
        "View",
    }
)
"""Linear in their one input, element by element: a mean of what they give is a mean of what they got."""
ADDING = frozenset({"Add", "Rsub", "Sub"})
"""Sums of terms."""
CHOOSING = frozenset({"Select", "Unbind"})
"""Take one row of a tensor."""
JOINING = frozenset({"Cat", "Stack"})
"""Lists of terms, if what they join are single numbers."""
SCALING = frozenset({"Mul", "Div"})
REDUCING = frozenset({"Mean", "Sum"})
COUPLING = frozenset(
    {
        "Amax",
        "Amin",
        "Cdist",
        "CdistForward",
        "Cummax",
        "Cummin",
        "Cumprod",
        "Cumsum",
        "Flip",
        "IndexAdd",
        "IndexReduce",
        "LinalgEigh",
        "LinalgSvd",
        "LinalgVectorNorm",
        "LogSoftmax",
        "Logsumexp",
        "Max",
        "Mean",
        "Median",
        "Min",
        "Norm",
        "Prod",
        "Roll",
        "ScatterAdd",
        "ScatterReduce",
        "SegmentReduce",
        "Softmax",
        "Sort",
        "Std",
        "Sum",
        "Svd",
        "Topk",
        "Var",
        "VarMean",
    }
)
"""Let samples see one another where they act on the first dim, or on all."""
PRODUCTS = frozenset({"Addmm", "Addmv", "Baddbmm", "Bmm", "Convolution", "Dot", "Mm", "Mv"})
"""Products of matrices: they couple samples where two factors come from a model's outputs."""
MATRIX_PRODUCTS = frozenset({"Addmm", "Addmv", "Mm", "Mv"})
"""Those that add up over the columns of the first factor, and over the rows of the second."""
TRANSPOSING = frozenset({"Permute", "T", "Transpose"})
_AS_ONE_RANK = ("rankwise.replicate.", "rankwise.tensor_parallel.", "rankwise.place.")
"""Where functions in Python compute what one rank computes."""
MIXED = "rankwise.whole_batch() next to samples of this rank alone"
LOOKUPS = frozenset({"Embedding", "EmbeddingBag", "Gather", "Index", "IndexSelect"})
"""Choose rows of a parameter by samples, which are not in the graph."""


@dataclass(frozen=True, slots=True)
class ForwardCall:
    """A forward call of a model."""

    model: int
    """Its number."""
    num_samples: Amount | None
    """The number that its loss is a mean over, as far as the call shows."""
    sizes: tuple[int, ...] = ()
    """The shape of its first input."""

    @property
    def is_empty(self) -> bool:
        """Whether it is known to have no samples."""
        return not isinstance(self.num_samples, torch.Tensor) and self.num_samples == 0.0


def given_weight(
    weight: Callable[..., float | torch.Tensor], args: Sequence[Any], kwargs: Mapping[str, Any], of: str = "model(...)"
) -> Amount:
    """Return what the user's function says that a loss is a mean over.

    Raises:
        ConfigurationError: it does not take the arguments of the call ``of``, or returned no number.
    """
    try:
        value = weight(*args, **kwargs)
    except TypeError as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
            raise  # of its own
        given = [*(type(one).__name__ for one in args), *(f"{name}=" for name in kwargs)]
        raise ConfigurationError(
            f"weight= is called with the arguments of {of}, and does not take these.",
            evidence=f"the call has {', '.join(given) or 'none'}; {error}",
            do="pass a function that takes them: weight=lambda x: len(x), or weight=lambda *args, **kwargs: ...",
        ) from None
    return one_amount(value, "weight= must return", "return")


def one_amount(value: object, rule: str, verb: str) -> Amount:
    """Return a number that a script has given as what a loss is a mean over.

    Args:
        value: given.
        rule: the first words of the error: "weight= must return".
        verb: what to do with the number.

    Raises:
        ConfigurationError: it is not one number.
    """
    try:
        return amount_of(value)  # type: ignore[arg-type] # that is checked here
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigurationError(
            f"{rule} one number, got {type(value).__name__}.",
            evidence=str(error),
            do=f"{verb} the number of samples or tokens that the loss is a mean over: len(x)",
        ) from None


def forward_call(
    model: int, weight: Callable[..., float | torch.Tensor] | None, args: object, kwargs: dict[str, Any]
) -> ForwardCall:
    """Return the facts of a forward call of a model.

    Args:
        model: its number.
        weight: the user's function of the call's arguments that returns what its loss is a mean over.
        args: of the call.
        kwargs: of the call.
    """
    first = first_tensor((args, kwargs))
    amount: Amount | None = None if first is None else float(first.shape[0])
    if weight is not None:
        amount = given_weight(weight, args, kwargs)  # type: ignore[arg-type] # a tuple, whatever torch calls it
    return ForwardCall(model, amount, () if first is None or first.is_nested else tuple(first.shape))


def first_tensor(values: object) -> torch.Tensor | None:
    """Return the first tensor of a tree that has dims; most often the first positional argument of a call."""
    if type(values) is tuple and values and type(values[0]) is tuple and values[0]:
        first = values[0][0]
        if isinstance(first, torch.Tensor) and first.ndim:
            return first
    return next((leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor) and leaf.ndim), None)


def outputs_of(output: object) -> list[torch.Tensor]:
    """Return the tensors of a forward's output that backward can come from, also in a dataclass."""
    if isinstance(output, torch.Tensor):
        return [output] if output.requires_grad else []
    found: list[torch.Tensor] = []
    for leaf in tree_leaves(output):
        values = [leaf] if isinstance(leaf, torch.Tensor) else list(getattr(leaf, "__dict__", {}).values())
        found += [value for value in values if isinstance(value, torch.Tensor) and value.requires_grad]
    return found


def mark_output(output: object, call: ForwardCall) -> list[torch.Tensor]:
    """Note that ``call`` returned ``output``; return its tensors that backward can come from."""
    found = [output] if isinstance(output, torch.Tensor) and output.requires_grad else outputs_of(output)
    for one in found:
        if one.grad_fn is not None:
            noted = metadata_of(one.grad_fn)
            noted[MARK] = call
            if not one.is_nested:
                noted.setdefault(SHAPES, {})[one.output_nr] = one.shape
    return found


def inputs_of(node: Node) -> list[Edge]:
    """Return the nodes that the gradient of a node is passed to, each with the number of its output."""
    return list(filter(_NODE, node.next_functions))


def operation_of(node: Node) -> str:
    """Return the operation that a node is the backward of: ``"NllLoss2D"`` for ``NllLoss2DBackward0``."""
    return _operation(node.name())


@cache
def _operation(name: str) -> str:
    return name.rpartition("::")[2].partition("Backward")[0]


@cache
def all_dims(num_dims: int) -> frozenset[int]:
    """Return the dims of a shape; one dim for a scalar, which is reduced like a tensor of one element."""
    return frozenset(range(max(num_dims, 1)))


def dims_of(node: Node, num_dims: int) -> frozenset[int]:
    """Return the dims that an operation acts along; all of them if it names none."""
    dims = saved(node, "dim")
    if dims is None or dims == ():
        return all_dims(num_dims)
    listed = dims if isinstance(dims, tuple) else (dims,)
    # A negative number of C++ arrives with 2**64 added.
    return frozenset((one - 2**64 if one >= 2**63 else one) % max(num_dims, 1) for one in listed)


def nodes_from(start: Node, limit: int = sys.maxsize, is_end: Callable[[Node], bool] | None = None) -> Generator[Node]:
    """Yield a node and all that its gradient is passed on to.

    Args:
        start: the node.
        limit: the most nodes to pass; ends do not count.
        is_end: returns whether to pass no further from a node.
    """
    stack, seen = [start], set[Any]()
    while stack and len(seen) < limit:
        node = stack.pop()
        if node in seen:
            continue
        yield node
        if is_end is None or not is_end(node):
            seen.add(node)
            stack += [one[0] for one in inputs_of(node)]


def is_of_parameters(start: Node) -> bool:
    """Return whether a value is computed from parameters alone: a penalty, the same on all ranks."""
    return not any(is_of_python(node) or lets_data_in(node) for node in nodes_from(start))


def lets_data_in(node: Node) -> bool:
    """Return whether samples may enter a graph at a node.

    Samples need no gradient, so they are not in the graph: they enter where a product has only one factor in it.
    """
    name = operation_of(node)
    return name in LOOKUPS or (name in PRODUCTS and any(one is None for one, _ in node.next_functions))


def is_whole_batch(node: Node) -> bool:
    """Return whether a node gathers the samples of all ranks."""
    return function_of(node) is WholeBatch


def leads_to_whole_batch(start: Node) -> bool:
    """Return whether a value is computed from the samples of all ranks."""
    return any(map(is_whole_batch, nodes_from(start)))


def masks_of(node: Node) -> list[torch.Tensor]:
    """Return the masks of the input of a reduction: where one is zero everywhere, nothing of the input is left."""
    names = {"Where": ["condition"], "Mul": ["other", "self"] if len(inputs_of(node)) == 1 else []}
    found = [saved(node, name) for name in names.get(operation_of(node), [])]
    return [one for one in found if isinstance(one, torch.Tensor)]


class LossReduction(NamedTuple):
    """A mean or a sum over dims of a tensor that a loss is computed from."""

    kind: Literal["mean", "sum"]
    node: Node
    shape: tuple[int, ...]
    dims: frozenset[int]
    amount: Amount
    is_weighted: bool = False
    """Whether a tensor gives the number that it is over."""


def loss_function_of(node: Node, kind: int, shape: tuple[int, ...]) -> LossReduction:
    """Return the reduction of torch's kind 1 or 2 inside a loss function, whose node holds what its mean is over."""
    if kind != 1:
        return LossReduction("sum", node, shape, all_dims(len(shape)), 1.0)
    total = saved(node, "total_weight")
    amount = math.prod(shape) if total is None else amount_of(total)
    return LossReduction("mean", node, shape, all_dims(len(shape)), amount, total is not None)


def reduction_of(node: Node, shape: tuple[int, ...], shape_before: tuple[int, ...]) -> LossReduction:
    """Return the reduction of a node of ``mean`` or ``sum``, from the shapes of its result and its input."""
    dims = dims_of(node, len(shape_before))
    if operation_of(node) != "Mean":
        return LossReduction("sum", node, shape_before, dims, 1.0)
    return LossReduction("mean", node, shape_before, dims, math.prod(shape_before) / max(math.prod(shape), 1))


# -- operations that couple samples ---------------------------------------------------------------------


def coupling_at(
    node: Node, shape: Callable[[Edge], tuple[int, ...]], is_of_outputs: Callable[[Node], bool]
) -> str | None:
    """Return how a node lets samples see one another, in words; ``None`` if it does not.

    Args:
        node: that a value on the way to a loss is computed by.
        shape: returns the shape of a value.
        is_of_outputs: returns whether a value is computed from outputs of models.
    """
    name, inputs = operation_of(node), inputs_of(node)
    if not inputs or name == "AccumulateGrad":
        return None
    function = function_of(node)
    if function is WholeBatch:
        return MIXED
    if is_of_python(node) or name == "CompiledFunction":
        return None if function is not None and function.__module__.startswith(_AS_ONE_RANK) else name
    # Operations of a model, or a criterion, on its parameters alone do not involve samples.
    are_pairs = name in ADDING | SCALING and len(inputs) > 1 and _are_pairs(inputs, shape, is_of_outputs)
    if not (are_pairs or name in COUPLING or name in PRODUCTS) or not is_of_outputs(node):
        return None
    if are_pairs:
        return f"{name} of every pair of samples"
    first = shape(inputs[0])
    if name in COUPLING and 0 in dims_of(node, len(first)):
        return f"{name} over the first dim"
    if name in MATRIX_PRODUCTS and _adds_up_samples(node, is_of_outputs):
        return f"{name} over the first dim"
    if name in PRODUCTS and len(inputs) > 1:
        from_data = [one for one in inputs if is_of_outputs(one[0])]
        if len(from_data) > 1 and (len(first) < 3 or first[0] == 1):  # noqa: PLR2004 - batched ones have three
            return f"{name} of two outputs"
    return None


def _adds_up_samples(node: Node, is_of_outputs: Callable[[Node], bool]) -> bool:
    """Return whether a product adds up over the rows of an output: ``y.T @ z``, and so gradients of weights."""
    first, second = (one[0] for one in node.next_functions[-2:])
    return any(
        one is not None and is_of_outputs(one) and (operation_of(one) in TRANSPOSING) is is_first
        for one, is_first in ((first, True), (second, False))
    )


def _are_pairs(
    inputs: Sequence[Edge], shape: Callable[[Edge], tuple[int, ...]], is_of_outputs: Callable[[Node], bool]
) -> bool:
    """Return whether two outputs are broadcast so that each sample meets all: ``p[:, None] - n[None]``."""
    added = [
        dims_of(one[0], len(shape(one))) if operation_of(one[0]) == "Unsqueeze" else frozenset[int]() for one in inputs
    ]
    sizes = [len(shape(one)) for one in inputs]
    return any(
        added[one] and 0 not in added[one] and (0 in added[1 - one] or 0 < sizes[1 - one] < sizes[one])
        for one in (0, 1)
    ) and all(is_of_outputs(one[0]) for one in inputs)
