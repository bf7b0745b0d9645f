# SPDX-License-Identifier: Apache-2.0
"""Whether a module computes the same when a pair of its layers is split: found by running it both ways.

A copy of the module with random parameters, in float64 on the CPU, runs once whole and once as each of the ranks would
run it, on a small input. The split is right where outputs and gradients agree to rounding. Nothing of the module itself
changes, and only one module is copied at a time. Used by plan.
"""

from __future__ import annotations

import copy
import random
import warnings
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the usual name

from rankwise.parallel.tensor_parallel.example_inputs import example_inputs
from rankwise.torch_private import tree as pytree
from rankwise.torch_private.kernels import DispatchMode
from rankwise.torch_private.modules import TABLES, aliases, own_buffers, own_parameters

if TYPE_CHECKING:
    from collections.abc import Generator, Hashable, Iterator, Mapping

TOLERANCE = 1e-10
"""How far results may be apart, as a part of the largest of them or of 1."""
MAX_ELEMENTS = 2**29
"""How many elements the parameters beside the pair may have, which are copied whole."""
_LOWER = {torch.float32, torch.float16, torch.bfloat16}
_UNLIKE = {*TABLES, "layer_idx", "layer_id", "layer_index", "layer_number"}
"""What differs between layers that are alike: the place that a layer knows to have, as for a cache."""


@dataclass(frozen=True)
class Split:
    """A pair of layers, of which each rank has a part, and the sizes with which that is tried."""

    columns: tuple[str, ...]
    """Linear layers that are split by their outputs, by name within the module."""
    row: str
    """The one that is split by its inputs."""
    num_parts: int
    features: Mapping[str, int]
    """By layer: outputs of a column on one rank, inputs of the row."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Attributes of the module that count heads, and what they count on one rank."""
    heads: int = 0
    """Heads on one rank: outputs beside the first, [batch, heads, ...], may be of these."""
    head_size: int = 0


class Proofs:
    """What was found about splits, so that modules that are alike are tried once.

    Lives as long as one search for a plan, while no module changes.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, str | None] = {}

    def why_not(self, module: nn.Module, split: Split) -> str | None:
        """Return why a module must not be split so; ``None`` where the split is right.

        Args:
            module: any that can be called, also on the meta device.
            split: layers that are ``nn.Linear``.
        """
        key = (_description(module), split.columns, split.row, split.num_parts, *sorted(split.counts.items()))
        if key not in self._known:
            self._known[key] = _why_not(module, split)
        return self._known[key]


class _Differs(Exception):
    """What is not the same."""


def _why_not(module: nn.Module, split: Split) -> str | None:
    layers = {module.get_submodule(name) for name in (*split.columns, split.row)}
    others = {parameter for one in module.modules() if one not in layers for parameter in one.parameters(recurse=False)}
    if sum(parameter.numel() for parameter in others) > MAX_ELEMENTS:
        return f"it has other parameters of more than {MAX_ELEMENTS} elements, too many to try it on a copy"
    with _aside():
        try:
            _prove(module, split)
        except _Differs as reason:
            return str(reason)
        except Exception as error:  # noqa: BLE001 - whatever the module's code raises on a part
            return f"its code does not run on a part: {_first_line(error)}"
    return None


def _prove(module: nn.Module, split: Split) -> None:
    """Raise unless both ways agree: in evaluation with gradients, in training without."""
    values = _Values(module, split)
    inputs, whole = _first_that_runs(module, split, values)
    parts = [_run(module, split, values, inputs, part=part, answers=whole.answers) for part in range(split.num_parts)]
    compared = _check_outputs(split, whole, parts)
    _backward([whole], compared)
    _backward(parts, compared)
    scale = max((float(one.abs().max()) for one in whole.gradients().values() if one.numel()), default=0.0)
    for number, part in enumerate(parts):
        _check_gradients(split, number, part.gradients(), whole.gradients(), scale)
    del parts, whole
    with torch.no_grad():
        whole = _run(module, split, values, inputs, training=True)
        parts = [
            _run(module, split, values, inputs, part=part, answers=whole.answers, training=True)
            for part in range(split.num_parts)
        ]
        _check_outputs(split, whole, parts)


def _first_that_runs(module: nn.Module, split: Split, values: _Values) -> tuple[Any, _Run]:
    """Return the first input that the module takes as a whole, and what it made of it."""
    first = module.get_submodule(split.columns[0])
    other = module.get_submodule(split.columns[-1])
    head_size = split.head_size or next((size for size in map(_head_size, module.modules()) if size), 2)
    reason: str | None = None
    for inputs in example_inputs(module, int(first.in_features), int(other.in_features), head_size):  # type: ignore[arg-type]
        try:
            whole = _run(module, split, values, inputs)
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


# -- one way of running ----------------------------------------------------------------------------------


class _Values:
    """What every copy has: random parameters, the same for all, and of the pair's layers as many as are tried."""

    def __init__(self, module: nn.Module, split: Split) -> None:
        self._generator = torch.Generator("cpu").manual_seed(0)
        self.layers: dict[str, tuple[torch.Tensor, torch.Tensor | None]] = {}
        pair: set[nn.Module] = set()
        for name in (*split.columns, split.row):
            layer = module.get_submodule(name)
            pair.add(layer)
            size = split.features[name] * split.num_parts
            outputs, inputs = (int(one) for one in layer.weight.shape)  # type: ignore[union-attr]
            outputs, inputs = (outputs, size) if name == split.row else (size, inputs)
            bias = None if own_parameters(layer)["bias"] is None else self._random((outputs,))
            self.layers[name] = self._random((outputs, inputs)), bias
        self.tensors: dict[torch.Tensor, torch.Tensor] = {}
        for one in module.modules():
            for parameter in one.parameters(recurse=False):
                if one not in pair:
                    self.tensors[parameter] = self._random(tuple(parameter.shape), parameter.dtype)
                elif parameter not in self.tensors:
                    # Only calls of the layer are split. Other uses of its weight, which keeps its shape, give NaN.
                    self.tensors[parameter] = torch.full((), torch.nan, dtype=torch.float64).expand(parameter.shape)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a buffer, or another tensor that is no parameter, as copies have it."""
        if tensor.is_meta:
            return self.tensors.setdefault(tensor, self._random(tuple(tensor.shape), tensor.dtype))
        dtype = torch.float64 if tensor.dtype in _LOWER else tensor.dtype
        return tensor.detach().to("cpu", dtype, copy=True)

    def _random(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> torch.Tensor:
        if not dtype.is_floating_point:
            return torch.ones(shape, dtype=dtype)
        if len(shape) > 1:
            return torch.randn(shape, generator=self._generator, dtype=torch.float64).div_(max(shape[-1], 1) ** 0.5)
        return torch.rand(shape, generator=self._generator, dtype=torch.float64).add_(0.5)


@dataclass
class _Cut:
    """Where ranks communicate: gradients stop there, until those of all ranks are known."""

    layer: str
    is_summed: bool
    """Whether the gradient is the sum of those of all ranks."""
    value: torch.Tensor
    leaf: torch.Tensor


@dataclass
class _Run:
    """What a copy did."""

    outputs: list[torch.Tensor] = field(default_factory=list)
    kept: dict[str, torch.Tensor] = field(default_factory=dict)
    """Tensors that the modules hold afterwards, beside parameters."""
    shares: list[torch.Tensor] = field(default_factory=list)
    """By call of the row: its output without the bias, which parts add up to."""
    answers: list[torch.Tensor] = field(default_factory=list)
    """By call of the row: its output."""
    calls: set[str] = field(default_factory=set)
    cuts: list[_Cut] = field(default_factory=list)
    leaves: dict[str, torch.Tensor] = field(default_factory=dict)
    """What has gradients, by name."""

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return the gradients; zeros where there is none."""
        return {name: torch.zeros_like(one) if one.grad is None else one.grad for name, one in self.leaves.items()}


class _Layer:
    """What stands in for the ``forward`` of a layer of the pair: with a part of its weight, or all of it.

    A part of a column passes its input on, whose gradient is the sum over ranks; that of the row gives its share of a
    sum, and gets the whole sum back.
    """

    def __init__(self, run: _Run, name: str, *, is_row: bool, answers: list[torch.Tensor] | None) -> None:
        self._run = run
        self._name = name
        self._is_row = is_row
        self._answers = answers

    def __call__(self, x: torch.Tensor, /) -> torch.Tensor:
        run, name = self._run, self._name
        weight, bias = run.leaves[f"{name}.weight"], run.leaves.get(f"{name}.bias")
        run.calls.add(name)
        if not self._is_row:
            if self._answers is None:
                return F.linear(x, weight, bias)
            leaf = x.detach().clone().requires_grad_()
            run.cuts.append(_Cut(name, True, x, leaf))
            return F.linear(leaf, weight, bias)
        share = F.linear(x, weight)
        number = len(run.shares)
        run.shares.append(share.detach())
        if self._answers is None:
            output = share if bias is None else share + bias
            run.answers.append(output.detach().clone())
            return output
        leaf = self._answers[number].clone().requires_grad_()
        run.cuts.append(_Cut(name, False, share, leaf))
        return leaf.clone()


def _run(
    module: nn.Module,
    split: Split,
    values: _Values,
    inputs: tuple[list[Any], dict[str, Any]],
    *,
    part: int | None = None,
    answers: list[torch.Tensor] | None = None,
    training: bool = False,
) -> _Run:
    """Run a copy of the module on copies of the inputs: whole, or as the rank that has one of the parts."""
    run = _Run()
    owner = _copy_of(module, split, values, run)
    for name, (weight, bias) in values.layers.items():
        is_row = name == split.row
        if part is not None:
            weight = weight.chunk(split.num_parts, 1 if is_row else 0)[part]  # noqa: PLW2901 - this rank's
            bias = None if is_row or bias is None else bias.chunk(split.num_parts)[part]  # noqa: PLW2901
        run.leaves[f"{name}.weight"] = weight.detach().requires_grad_()
        if bias is not None:
            run.leaves[f"{name}.bias"] = bias.detach().requires_grad_()
        _stand_in(owner.get_submodule(name), _Layer(run, name, is_row=is_row, answers=answers))
    for attribute, count in split.counts.items():
        setattr(owner, attribute, count if part is not None else count * split.num_parts)
    owner.train(training)

    def given(tensor: Any) -> Any:  # noqa: ANN401 - anything that is no tensor stays
        if not isinstance(tensor, torch.Tensor):
            return tensor
        if not tensor.requires_grad:
            return tensor.clone()
        leaf = tensor.detach().requires_grad_()
        run.leaves[f"input {sum(key.startswith('input ') for key in run.leaves)}"] = leaf
        return leaf.clone()  # which code may change in place

    args, kwargs = pytree.tree_map(given, inputs)
    torch.default_generator.manual_seed(0)
    output = owner(*args, **kwargs)
    run.outputs = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    run.kept = dict(_kept(owner))
    return run


def _stand_in(module: nn.Module, layer: _Layer) -> None:
    module.forward = layer


def _copy_of(module: nn.Module, split: Split, values: _Values, run: _Run) -> nn.Module:
    """Return a copy whose parameters are leaves of ``run``, but for those of the pair."""
    copies = aliases(module)
    name_of = {one: name for name, one in module.named_modules()}
    pair = {module.get_submodule(name) for name in (*split.columns, split.row)}
    made: dict[torch.Tensor, nn.Parameter] = {}
    for original, one in copies.items():
        for key, value in list(vars(one).items()):
            if isinstance(value, torch.Tensor):
                vars(one)[key] = values.of(value)
            elif key not in TABLES and isinstance(value, dict | list | set):
                vars(one)[key] = copy.copy(value)
        for name, parameter in original.named_parameters(recurse=False, remove_duplicate=False):
            if parameter not in made:
                value = values.tensors[parameter].detach()
                made[parameter] = nn.Parameter(value, requires_grad=value.is_floating_point() and original not in pair)
                if made[parameter].requires_grad:
                    run.leaves[f"{name_of[original]}.{name}".lstrip(".")] = made[parameter]
            own_parameters(one)[name] = made[parameter]
        for name, buffer in original.named_buffers(recurse=False, remove_duplicate=False):
            own_buffers(one)[name] = values.of(buffer)
    return copies[module]


def _kept(owner: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what modules hold, by name."""
    for name, module in owner.named_modules():
        held = {key: value for key, value in vars(module).items() if key not in TABLES}
        for place, leaf in enumerate(pytree.tree_leaves(held)):
            if isinstance(leaf, torch.Tensor):
                yield f"{name}[{place}]", leaf
        for key, buffer in module.named_buffers(recurse=False):
            yield f"{name}.{key}", buffer


# -- what has to agree -----------------------------------------------------------------------------------


def _check_outputs(split: Split, whole: _Run, parts: list[_Run]) -> list[int]:
    """Raise where results differ; return which outputs every rank has whole."""
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
    """Return whether an output, [batch, heads, ...], is that of one rank's heads: attention's weights."""
    heads = split.heads * split.num_parts
    if not heads or expected.ndim < 3 or expected.shape[1] != heads:  # noqa: PLR2004 - batch, heads and more
        return False
    return _is_close(found, expected.chunk(split.num_parts, 1)[rank])


def _backward(runs: list[_Run], compared: list[int]) -> None:
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


# -- surroundings ----------------------------------------------------------------------------------------


class _InFloat64(DispatchMode):
    """Has code that works in lower precision work in float64, and dropout pass everything on."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        kwargs = dict(kwargs or {})
        if func is torch.ops.aten.bernoulli_.float:
            return args[0].fill_(args[1] if len(args) > 1 else kwargs.get("p", 0.5))
        if kwargs.get("dtype") in _LOWER:
            kwargs["dtype"] = torch.float64
        output = func(*args, **kwargs)
        # What a factory makes without being told a dtype.
        return output.double() if isinstance(output, torch.Tensor) and output.dtype in _LOWER else output


@contextmanager
def _aside() -> Generator[None]:
    """Leave random numbers, warnings and the mode of autograd as they are; work on the CPU, in float64."""
    with ExitStack() as during:
        during.callback(random.setstate, random.getstate())
        # All ranks of a machine try at once, with small tensors: their threads would only wait for one another.
        during.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        during.enter_context(torch.random.fork_rng(devices=[]))
        during.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        during.enter_context(torch.inference_mode(False))
        during.enter_context(torch.enable_grad())
        during.enter_context(torch.autocast("cpu", enabled=False))
        during.enter_context(torch.device("cpu"))
        during.enter_context(_InFloat64())
        yield


def _description(module: nn.Module) -> Hashable:
    """Return what modules have alike that compute alike."""
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
    """Return a value that is equal for equal plain values, and for the same object only of others."""
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
