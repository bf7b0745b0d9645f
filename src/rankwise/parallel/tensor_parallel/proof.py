# SPDX-License-Identifier: Apache-2.0
"""Whether a module computes the same when a pair of its layers is split, found by running it both ways.

A copy of the module runs once whole and once as each rank would run it, on a small input. The split is right if outputs
and gradients agree to rounding. Only one module is copied at a time. Used by found_plan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rankwise.parallel.tensor_parallel.example_inputs import example_inputs
from rankwise.parallel.tensor_parallel.trial import Run, Split, Values, aside, run_copy
from rankwise.torch_private.modules import TABLES

if TYPE_CHECKING:
    from collections.abc import Hashable

TOLERANCE = 1e-10
"""The largest allowed difference of results, relative to the largest of them or to 1."""
MAX_ELEMENTS = 2**29
"""The parameters beside the pair, which are copied whole, may have so many elements."""
_UNLIKE = {*TABLES, "layer_idx", "layer_id", "layer_index", "layer_number"}
"""Attributes that differ between identical layers: the index of a layer, as for a cache."""


class Proofs:
    """The results of trials, so that identical modules are tried once. Valid as long as no module changes."""

    def __init__(self) -> None:
        self._known: dict[Hashable, str | None] = {}

    def why_not(self, module: nn.Module, split: Split) -> str | None:
        """Return why a module must not be split in this way; ``None`` if the split is right.

        The module may be on the meta device; the layers of the split are ``nn.Linear``.
        """
        key = (_description(module), split.columns, split.row, split.num_parts, *sorted(split.counts.items()))
        if key not in self._known:
            self._known[key] = _why_not(module, split)
        return self._known[key]


class _Differs(Exception):
    """The two ways differ; the message says in what."""


def _why_not(module: nn.Module, split: Split) -> str | None:
    layers = {module.get_submodule(name) for name in (*split.columns, split.row)}
    others = {parameter for one in module.modules() if one not in layers for parameter in one.parameters(recurse=False)}
    if sum(parameter.numel() for parameter in others) > MAX_ELEMENTS:
        return f"it has other parameters of more than {MAX_ELEMENTS} elements, too many to try it on a copy"
    with aside():
        try:
            _prove(module, split)
        except _Differs as reason:
            return str(reason)
        except Exception as error:  # noqa: BLE001 - whatever the module's code raises on a part
            return f"its code does not run on a part: {_first_line(error)}"
    return None


def _prove(module: nn.Module, split: Split) -> None:
    """Raise unless both ways agree: in evaluation with gradients, in training without."""

    def parts_like(whole: Run, *, training: bool = False) -> list[Run]:
        return [
            run_copy(module, split, values, inputs, part=part, answers=whole.answers, training=training)
            for part in range(split.num_parts)
        ]

    values = Values(module, split)
    inputs, whole = _first_that_runs(module, split, values)
    parts = parts_like(whole)
    compared = _check_outputs(split, whole, parts)
    _backward([whole], compared)
    _backward(parts, compared)
    scale = max((float(one.abs().max()) for one in whole.gradients().values() if one.numel()), default=0.0)
    for number, part in enumerate(parts):
        _check_gradients(split, number, part.gradients(), whole.gradients(), scale)
    del parts, whole
    with torch.no_grad():
        whole = run_copy(module, split, values, inputs, training=True)
        _check_outputs(split, whole, parts_like(whole, training=True))


def _first_that_runs(module: nn.Module, split: Split, values: Values) -> tuple[Any, Run]:
    """Return the first input that the whole module accepts, and its run."""
    first = module.get_submodule(split.columns[0])
    other = module.get_submodule(split.columns[-1])
    head_size = split.head_size or next((size for size in map(_head_size, module.modules()) if size), 2)
    reason: str | None = None
    for inputs in example_inputs(module, int(first.in_features), int(other.in_features), head_size):  # type: ignore[arg-type]
        try:
            whole = run_copy(module, split, values, inputs)
        except Exception as error:  # noqa: BLE001 - a wrong guess raises anything
            reason = reason or f"no input was found that its code takes: {_first_line(error)}"
            continue
        missing = split.row if split.row not in whole.calls else split.columns[0]
        if split.row not in whole.calls or not whole.calls & {*split.columns}:
            reason = f"its code does not call {missing}"
        elif not all(one.isfinite().all() for one in (*whole.outputs, *whole.kept.values())):
            reason = "its output is not finite, as where its code uses the weight of a layer itself"
        elif not whole.outputs:
            reason = "it returns no tensors"
        else:
            return inputs, whole
    raise _Differs(reason or "no input was found that its code takes")


def _check_outputs(split: Split, whole: Run, parts: list[Run]) -> list[int]:
    """Raise if results differ; return the numbers of the outputs that every rank has whole."""
    if any(len(part.shares) != len(whole.shares) or len(part.outputs) != len(whole.outputs) for part in parts):
        raise _Differs("its code does something else on a part")
    for number, expected in enumerate(whole.shares):
        if not _is_close(torch.stack([part.shares[number] for part in parts]).sum(0), expected):
            raise _Differs(f"the parts of {split.row} do not add up: its code mixes what lies between or uses its size")
    compared = [number for number, one in enumerate(whole.outputs) if one.is_floating_point()]
    for rank, part in enumerate(parts):
        for number, (found, expected) in enumerate(zip(part.outputs, whole.outputs, strict=True)):
            if _is_close(found, expected):
                continue
            if number == 0 or not _are_own_heads(split, rank, found, expected):
                raise _Differs("its output is another where it has a part: its code returns what lies between")
            compared = [one for one in compared if one != number]
        _check_kept(split, rank, part.kept, whole.kept)
    return compared


def _check_kept(split: Split, rank: int, part: dict[str, torch.Tensor], whole: dict[str, torch.Tensor]) -> None:
    if part.keys() != whole.keys():
        raise _Differs("its code keeps something else where it has a part")
    for name, found in part.items():
        if not _is_close(found, whole[name]) and not _are_own_heads(split, rank, found, whole[name]):
            raise _Differs("its code keeps what lies between")


def _are_own_heads(split: Split, rank: int, found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether an output, [batch, heads, ...], is one rank's part of the heads, as attention weights are."""
    heads = split.heads * split.num_parts
    if not heads or expected.ndim < 3 or expected.shape[1] != heads:  # noqa: PLR2004 - batch, heads and more
        return False
    return _is_close(found, expected.chunk(split.num_parts, 1)[rank])


def _backward(runs: list[Run], compared: list[int]) -> None:
    """Compute gradients of each rank's own loss, as ranks that communicate at the cuts do."""
    losses: list[torch.Tensor] = []
    for run in runs:
        generator = torch.Generator("cpu").manual_seed(2)
        for number in compared:
            output = run.outputs[number]
            weight = torch.randn(output.shape, generator=generator, dtype=output.dtype)
            if output.requires_grad:
                losses.append((output * weight).sum())
    torch.autograd.backward(losses, retain_graph=True)
    if len({tuple(cut.layer for cut in run.cuts) for run in runs}) > 1:
        raise _Differs("its code calls layers in another order on another rank")
    for cuts in zip(*(reversed(run.cuts) for run in runs), strict=True):
        gradients = [torch.zeros_like(cut.leaf) if cut.leaf.grad is None else cut.leaf.grad for cut in cuts]
        if cuts[0].is_summed:
            gradients = [torch.stack(gradients).sum(0)] * len(cuts)
        for cut, gradient in zip(cuts, gradients, strict=True):
            if cut.value.requires_grad:
                torch.autograd.backward(cut.value, gradient, retain_graph=True)


def _check_gradients(
    split: Split, rank: int, found: dict[str, torch.Tensor], whole: dict[str, torch.Tensor], scale: float
) -> None:
    for name, gradient in found.items():
        layer, _, _ = name.rpartition(".")
        expected = whole[name]
        if layer in {*split.columns, split.row}:
            expected = expected.chunk(split.num_parts, 1 if layer == split.row else 0)[rank]
        if not _is_close(gradient, expected, scale):
            raise _Differs(f"each rank would have another gradient of its {name}")


def _is_close(found: torch.Tensor, expected: torch.Tensor, scale: float = 0.0) -> bool:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if not found.is_floating_point() and not found.is_complex():
        return torch.equal(found, expected)
    finite = expected.abs()[expected.isfinite()]
    scale = max(1.0, scale, float(finite.max()) if finite.numel() else 0.0)
    return torch.allclose(found, expected, rtol=0.0, atol=TOLERANCE * scale)


def _description(module: nn.Module) -> Hashable:
    """Return a description that is equal for modules that compute the same."""
    return tuple(
        (
            name,
            type(one),
            *((key, p.shape, p.dtype) for key, p in one.named_parameters(recurse=False, remove_duplicate=False)),
            *((key, b.shape, b.dtype) for key, b in one.named_buffers(recurse=False, remove_duplicate=False)),
            *((key, _plain(value)) for key, value in vars(one).items() if key not in _UNLIKE),
        )
        for name, one in module.named_modules(remove_duplicate=False)
    )


def _plain(value: object) -> Hashable:
    """Return a value that is equal for equal plain values, and otherwise for the same object only."""
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return type(value), value
    if isinstance(value, dict):
        return "dict", *((_plain(key), _plain(one)) for key, one in value.items())  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if isinstance(value, list | tuple):
        return "list", *(_plain(one) for one in value)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if isinstance(value, set):
        return "set", frozenset(_plain(one) for one in value)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    return "object", id(value)


def _head_size(module: nn.Module) -> int:
    size = vars(module).get("head_dim")
    return size if isinstance(size, int) else 0


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
