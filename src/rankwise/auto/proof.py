# SPDX-License-Identifier: Apache-2.0
"""Whether a call of a module can be split by rows: what forbids it, where the rows are, and whether results agree.

Values in, values out: runs no module and sends nothing.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import nn
from torch.overrides import handle_torch_function

from rankwise.auto.rows import OutputRows
from rankwise.replicate.random_numbers.sample_layout import SampleLayout
from rankwise.replicate.random_numbers.scope import memory_order
from rankwise.tensors.checksum import checksums_of_each, combined
from rankwise.torch_private.compiler import is_compiled, module_within
from rankwise.torch_private.modules import BatchNorm, has_hooks_of_all, hooks_of, own_buffers, own_parameters
from rankwise.torch_private.tensors import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rankwise.auto.rows import Share

PLAIN = (str, bytes, bool, int, float, complex, type(None), torch.dtype, torch.device, torch.Size)
"""Types whose values every rank passes and returns alike."""
_TENSORS = (torch.Tensor, nn.Parameter)
TOLERANCE = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4}
"""How far split and whole results may differ, relative to the largest value."""
COARSE = 5e-2
"""The same for dtypes of 16 bits and fewer."""
_OF_TORCH = frozenset(vars(nn.Module()))


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a call must run whole."""

    text: str
    """In words that follow the module's name and a colon."""
    is_wrong: bool = False
    """Whether calls that were split before may have returned wrong values; others would have raised."""
    may_pass: bool = False
    """Whether it may hold in the first call only."""


@dataclass(frozen=True, slots=True)
class BatchDims:
    """Where the rows of a batch lie in the arguments of a call."""

    num_global: int
    dims: tuple[int | None, ...]
    """Per leaf of the arguments; ``None``: the same for every row."""


def batch_dims(leaves: Sequence[Any], num_ranks: int) -> list[BatchDims]:
    """Return where the rows may lie, the likeliest first: in the first dim of the first tensor, or in its second one.

    Only batches with a row for every rank count.
    """
    place = next((number for number, one in enumerate(leaves) if isinstance(one, torch.Tensor) and one.dim()), None)
    if place is None or leaves[place].shape[0] < num_ranks:
        return []
    found: dict[tuple[int | None, ...], BatchDims] = {}
    for dim, num_global in enumerate(leaves[place].shape[:2]):
        if num_global < num_ranks:
            continue
        as_long = tuple(_dim_of(one, num_global, dim) for one in leaves)
        # A mask may be as long as the batch by chance.
        alone = tuple(dim if number == place else None for number in range(len(leaves)))
        for dims in (as_long, alone):
            found.setdefault(dims, BatchDims(num_global, dims))
    return list(found.values())


def _dim_of(leaf: object, num_global: int, preferred: int) -> int | None:
    if not isinstance(leaf, torch.Tensor):
        return None
    dims = [dim for dim, size in enumerate(leaf.shape) if size == num_global]
    return preferred if preferred in dims else next(iter(dims), None)


def obstacle(module: nn.Module, leaves: Sequence[Any]) -> str | None:
    """Return why a call must not even be tried, in words that follow the module's name."""
    odd = next((one for one in leaves if not isinstance(one, PLAIN) and type(one) not in _TENSORS), None)
    if odd is not None:
        return f"it takes a {type(odd).__name__}, whose rows are unknown"
    if any(isinstance(one, torch.Tensor) and one.layout != torch.strided for one in leaves):
        return "it takes a sparse tensor"
    return _obstacle_in(module)


def _obstacle_in(module: nn.Module) -> str | None:
    if len({one.device for one in (*parameters_of(module), *buffers_of(module))}) > 1:
        return "it is on several devices"
    if has_hooks_of_all():
        return "there are hooks on all modules, which would see a part of the batch"
    if is_compiled(uncompiled(module)):
        return "a part of it is compiled by torch.compile"
    if not all(isinstance(one, nn.Parameter) for one in parameters_of(module)):
        return "it is called with other parameters than its own, as by torch.func.functional_call"
    for name, part in module.named_modules():
        part_of_it = f"its part {name}" if name else "it"
        if isinstance(part, torch.jit.ScriptModule):
            return f"{part_of_it} is compiled by torch.jit"
        if getattr(part, "sparse", False) is True:
            return f"{part_of_it} has sparse gradients"
        if getattr(part, "scale_grad_by_freq", False) is True:
            return f"{part_of_it} divides gradients by how often a row occurs in the batch"
        if any(_is_of_user(hook) for hook in hooks_of(part)):
            return f"{part_of_it} has hooks, which would see a part of the batch"
    return None


def _is_of_user(hook: object) -> bool:
    name: str = getattr(hook, "__module__", None) or type(hook).__module__
    return name.partition(".")[0] != "torch"


def parameters_of(module: nn.Module) -> list[torch.Tensor]:
    """Return all parameters, also those that ``functional_call`` replaces for a call, each once."""
    found = (one for part in module.modules() for one in own_parameters(part).values() if one is not None)
    return list({id(one): one for one in found}.values())


def checksum(tensors: Sequence[torch.Tensor]) -> int:
    """Return one number for the bits of dense tensors."""
    return combined(checksums_of_each([one.detach().contiguous() for one in tensors if one.layout == torch.strided]))


def buffers_of(module: nn.Module) -> list[torch.Tensor]:
    """Return all buffers."""
    return [one for part in module.modules() for one in own_buffers(part).values() if one is not None]


def copy_of(module: nn.Module) -> nn.Module:
    """Return a copy with the same parameters and with buffers and attributes of its own.

    Raises:
        Exception: it cannot be copied.
    """
    kept = parameters_of(module)
    # What a hook computes from parameters before each call, as pruning does, cannot be copied and is replaced.
    kept += [
        one
        for part in module.modules()
        for one in vars(part).values()
        if isinstance(one, torch.Tensor) and not one.is_leaf
    ]
    return copy.deepcopy(module, {id(one): one for one in kept})


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module that ``torch.compile`` has wrapped, if it has: what it does can be followed."""
    return module_within(module) or module


def tensors_kept(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors that modules hold in attributes, except parameters and buffers, and the names of these."""
    own = set(map(id, parameters_of(module)))  # of which recurrent layers hold a list
    return [
        (f"{name}.{key}", held)
        for name, part in module.named_modules()
        for key, value in vars(part).items()
        if key not in _OF_TORCH
        for held in tree_leaves(value)
        if isinstance(held, torch.Tensor) and id(held) not in own
    ]


def obstacle_after(
    module: nn.Module,
    checkpoints: Sequence[bool],
    *,
    changes_arguments: bool,
    changes_parameters: bool,
    is_random: bool,
) -> Reason | None:
    """Return why a call that has run whole must not be split.

    Args:
        module: that was called.
        checkpoints: its uses of torch.utils.checkpoint, whether they are reentrant.
        changes_arguments: whether the call has changed its arguments.
        changes_parameters: whether the call has changed the module's parameters.
        is_random: whether the call has drawn random numbers.
    """
    has_batchnorm = any(isinstance(one, BatchNorm) and one.training for one in module.modules())
    if changes_arguments:
        return Reason("it changes its arguments", is_wrong=True)
    if changes_parameters:
        return Reason("it changes its parameters in forward", is_wrong=True)
    if any(checkpoints):
        return Reason("it uses torch.utils.checkpoint with use_reentrant=True")
    if checkpoints and has_batchnorm:
        return Reason("it uses torch.utils.checkpoint around BatchNorm")
    if uncompiled(module) is not module and (has_batchnorm or is_random):
        return Reason("it is compiled, with BatchNorm or random numbers in it")
    return None


def difference_beside(module: nn.Module, copy: nn.Module) -> Reason | None:
    """Return why a copy that ran on rows has not become what the module is after the whole call."""
    buffers = zip(buffers_of(module), buffers_of(copy), strict=True)
    is_same = all(one.shape == other.shape and agree(one, other) for one, other in buffers)
    return None if is_same else Reason("its buffers depend on the rows", is_wrong=True)


def gradient_elsewhere(module: nn.Module, given: Sequence[Any], result: object) -> Reason | None:
    """Return why a call must not be split whose result depends on trained tensors that the module does not own."""
    # functional_call() gives a module parameters that have been computed from others.
    own = [*parameters_of(module), *(one for one in given if isinstance(one, torch.Tensor))]
    known = set(map(id, own))
    pending = [one.grad_fn for one in tree_leaves(result) if isinstance(one, torch.Tensor)]
    seen: set[Any] = {one.grad_fn for one in own}
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if id(getattr(node, "variable", None)) not in known and hasattr(node, "variable"):
            return Reason("it computes gradients of a tensor that is none of its parameters", is_wrong=True)
        pending += [before for before, _ in node.next_functions]
    return None


def difference(
    whole: Sequence[Any], own: Sequence[Any], share: Share, layout_of: Callable[[torch.Tensor], SampleLayout | None]
) -> tuple[Reason | None, tuple[OutputRows | None, ...]]:
    """Return why the outputs of a split call are not its rows of the whole outputs, and where the rows lie."""
    places: list[OutputRows | None] = []
    for number, (one, other) in enumerate(zip(whole, own, strict=True)):
        words = f"output {number}" if len(whole) > 1 else "the output"
        if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
            if not isinstance(one, PLAIN):
                return Reason(f"it returns a {type(one).__name__}, whose rows are unknown"), ()
            if one != other:
                return Reason(f"{words} depends on the number of rows", is_wrong=True), ()
            places.append(None)
            continue
        if one.layout != torch.strided or one.dim() != other.dim():
            return Reason(f"{words} has no rows"), ()
        layout = _layout(one, other, share, layout_of(other))
        if layout is None and one.shape != other.shape:
            text = f"{words} is {list(one.shape)} for the whole batch and {list(other.shape)} for {share.num} rows"
            return Reason(text), ()
        rows = one if layout is None else layout.part(one, share.num_global, share.start, share.num)
        if not agree(rows, other):
            text = f"{words} depends on the rest of the batch (compared on {share.num} of {share.num_global} rows)"
            return Reason(text, is_wrong=True), ()
        places.append(None if layout is None else OutputRows(layout, memory_order(one.stride())))
    return None, tuple(places)


def _layout(whole: torch.Tensor, own: torch.Tensor, share: Share, followed: SampleLayout | None) -> SampleLayout | None:
    """Return where the rows lie in an output; ``None``: it is the same for every row, or that is unknown.

    Args:
        whole: the output for the whole batch.
        own: for this rank's rows.
        share: this rank's.
        followed: where the samples have been followed to.
    """
    apart = [dim for dim in range(whole.dim()) if whole.shape[dim] != own.shape[dim]]
    if followed is not None and [followed.dim] == apart and followed.fits(own.shape, share.num):
        return followed
    alone = SampleLayout(apart[0]) if len(apart) == 1 else None
    return alone if alone and alone.fits(own.shape, share.num) and alone.fits(whole.shape, share.num_global) else None


def shares_memory(result: object, given: Sequence[Any], module: nn.Module) -> Reason | None:
    """Return why a call must not be split that returns memory of its arguments or the module, or some memory twice."""
    held = [one for one in (*given, *parameters_of(module), *buffers_of(module)) if isinstance(one, torch.Tensor)]
    places = {_address(one) for one in held} - {0}
    returned = {id(one): one for one in tree_leaves(result) if isinstance(one, torch.Tensor)}
    addresses = [address for one in returned.values() if (address := _address(one))]
    if any(one in places for one in addresses):
        return Reason("it returns memory of its arguments or parameters, which the script could change")
    return Reason("it returns two tensors of one memory") if len(set(addresses)) < len(addresses) else None


def _address(tensor: torch.Tensor) -> int:
    """Return where the memory of a tensor begins; 0 if it has none."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0


def elsewhere(whole: Sequence[Any], joined: Sequence[Any]) -> Reason | None:
    """Return why the rows of all ranks are not the whole outputs."""
    for one, other in zip(whole, joined, strict=True):
        if isinstance(one, torch.Tensor) and not (one.shape == other.shape and agree(one, other)):
            return Reason(
                "the output depends on the rest of the batch (compared on rows of other ranks)", is_wrong=True
            )
    return None


@torch.no_grad()
def agree(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one shape are equal but for rounding."""
    if one.dtype != other.dtype:
        return False
    if not (one.is_floating_point() or one.is_complex()):
        return bool(torch.equal(one, other))
    if not one.numel():
        return True
    relative = TOLERANCE.get(one.dtype, COARSE)
    one, other = (
        tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64) for tensor in (one, other)
    )
    finite = one.abs()[one.isfinite()]
    scale = float(finite.max()) if finite.numel() else 0.0
    return bool(torch.allclose(one, other, rtol=relative, atol=relative * scale, equal_nan=True))


def is_of_subclass(leaf: object) -> TypeGuard[torch.Tensor]:
    """Tell whether a value is a tensor of a subclass that holds values of its own."""
    if not isinstance(leaf, torch.Tensor) or type(leaf) in {torch.Tensor, torch.nn.Parameter}:
        return False
    return next(kind for kind in type(leaf).__mro__ if "__torch_dispatch__" in vars(kind)) is torch.Tensor


def plain(leaf: Any) -> Any:
    """Return a value, as a plain tensor of the same memory where it is one of a subclass."""
    return leaf.as_subclass(torch.Tensor) if is_of_subclass(leaf) else leaf


def as_output(output: Any, given: Sequence[Any]) -> Any:
    """Return an output as a function returns it whose arguments are ``given``."""
    dressed = [one for one in given if is_of_subclass(one)]
    if not dressed or not isinstance(output, torch.Tensor):
        return output
    return handle_torch_function(_first, dressed, output, *dressed)


def is_alike(output: Any, other: Any) -> bool:
    """Tell whether two outputs are of one type, and hold equal facts."""
    if not isinstance(output, torch.Tensor) or type(output) is torch.Tensor is type(other):
        return True
    return type(output) is type(other) and repr(vars(output)) == repr(vars(other))


def _first(output: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    return output
