# SPDX-License-Identifier: Apache-2.0
"""A copy of a module that is run to try a split: whole, or as one rank would run it.

Copies have random parameters, in float64 on the CPU; the module itself does not change. Used by proof.
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

from rankwise.torch_private import tree as pytree
from rankwise.torch_private.kernels import DispatchMode
from rankwise.torch_private.modules import TABLES, aliases, own_buffers, own_parameters

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping

MOST_MIXED = 64
"""So many combinations of a layer's features are tried, where the layer is not split along them."""
_LOWER = {torch.float32, torch.float16, torch.bfloat16}


@dataclass(frozen=True)
class Split:
    """A pair of layers of which each rank has a part, and the sizes used in the trial."""

    columns: tuple[str, ...]
    """Linear layers that are split by their outputs, by name within the module."""
    row: str
    """The one that is split by its inputs."""
    num_parts: int
    features: Mapping[str, int]
    """By layer: outputs of a column on one rank, inputs of the row."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Attributes of the module that count heads, and their values on one rank."""
    heads: int = 0
    """Heads on one rank: outputs after the first, [batch, heads, ...], may belong to these."""
    head_size: int = 0


class Values:
    """Random parameters, the same for all copies. Layers of the pair have only the features that are tried."""

    def __init__(self, module: nn.Module, split: Split) -> None:
        self._generator = torch.Generator("cpu").manual_seed(0)
        self.layers: dict[str, tuple[torch.Tensor, torch.Tensor | None]] = {}
        """Weight and bias of each layer of the pair."""
        self._mixtures: dict[int, torch.Tensor] = {}
        pair: set[nn.Module] = set()
        for name in (*split.columns, split.row):
            layer = module.get_submodule(name)
            pair.add(layer)
            size = split.features[name] * split.num_parts
            outputs, inputs = (int(one) for one in layer.weight.shape)  # type: ignore[union-attr]
            outputs, inputs = (outputs, size) if name == split.row else (size, inputs)
            shape = (min(outputs, MOST_MIXED), inputs) if name == split.row else (outputs, min(inputs, MOST_MIXED))
            bias = None if own_parameters(layer)["bias"] is None else self._random((outputs,))
            self.layers[name] = self._random(shape), bias
        self.tensors: dict[torch.Tensor, torch.Tensor] = {}
        for one in module.modules():
            for parameter in one.parameters(recurse=False):
                if one not in pair:
                    self.tensors[parameter] = self._random(tuple(parameter.shape), parameter.dtype)
                elif parameter not in self.tensors:
                    # Only calls of the layer are split. Other uses of its weight, which keeps its shape, give NaN.
                    self.tensors[parameter] = torch.full((), torch.nan, dtype=torch.float64).expand(parameter.shape)

    def mixture(self, width: int) -> torch.Tensor | None:
        """Return the [MOST_MIXED, width] matrix between a wide dim that is not split and a weight.

        A weight of 4096 x 4096 in float64 takes longer to fill than all else: the weights tried are products of a
        small one with this. Each element still depends on every input, so a wrong split still gives other results.
        """
        if width <= MOST_MIXED:
            return None
        if width not in self._mixtures:
            self._mixtures[width] = self._random((MOST_MIXED, width))
        return self._mixtures[width]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a buffer, or another tensor that is not a parameter, as copies have it."""
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
class Cut:
    """A place where ranks communicate: gradients stop there until those of all ranks are known."""

    layer: str
    is_summed: bool
    """Whether the gradient is the sum of those of all ranks."""
    value: torch.Tensor
    leaf: torch.Tensor


@dataclass
class Run:
    """The results of one run of a copy."""

    outputs: list[torch.Tensor] = field(default_factory=list)
    kept: dict[str, torch.Tensor] = field(default_factory=dict)
    """Tensors that the modules hold afterwards, without parameters."""
    shares: list[torch.Tensor] = field(default_factory=list)
    """By call of the row: its output without the bias, which parts add up to."""
    answers: list[torch.Tensor] = field(default_factory=list)
    """By call of the row: its output."""
    calls: set[str] = field(default_factory=set)
    cuts: list[Cut] = field(default_factory=list)
    leaves: dict[str, torch.Tensor] = field(default_factory=dict)
    """What has gradients, by name."""

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return the gradients; zeros where there is none."""
        return {name: torch.zeros_like(one) if one.grad is None else one.grad for name, one in self.leaves.items()}


class _Layer:
    """Replaces the ``forward`` of a layer of the pair, with a part of its weight or all of it.

    The gradient of a column's input is the sum over ranks. A part of the row contributes its share of a sum, and
    returns the whole sum.
    """

    def __init__(
        self, run: Run, name: str, mixture: torch.Tensor | None, *, is_row: bool, answers: list[torch.Tensor] | None
    ) -> None:
        self._run = run
        self._name = name
        self._mixture = mixture
        self._is_row = is_row
        self._answers = answers

    def __call__(self, x: torch.Tensor, /) -> torch.Tensor:
        run, name = self._run, self._name
        weight, bias = run.leaves[f"{name}.weight"], run.leaves.get(f"{name}.bias")
        run.calls.add(name)
        if not self._is_row:
            if self._answers is not None:
                leaf = x.detach().clone().requires_grad_()
                run.cuts.append(Cut(name, True, x, leaf))
                x = leaf
            return F.linear(x if self._mixture is None else F.linear(x, self._mixture), weight, bias)
        share = F.linear(x, weight)
        if self._mixture is not None:
            share = share @ self._mixture
        number = len(run.shares)
        run.shares.append(share.detach())
        if self._answers is None:
            output = share if bias is None else share + bias
            run.answers.append(output.detach().clone())
            return output
        leaf = self._answers[number].clone().requires_grad_()
        run.cuts.append(Cut(name, False, share, leaf))
        return leaf.clone()


def run_copy(
    module: nn.Module,
    split: Split,
    values: Values,
    inputs: tuple[list[Any], dict[str, Any]],
    *,
    part: int | None = None,
    answers: list[torch.Tensor] | None = None,
    training: bool = False,
) -> Run:
    """Run a copy of the module on copies of the inputs: whole, or as the rank with this part."""
    run = Run()
    owner = _copy_of(module, split, values, run)
    for name, (weight, bias) in values.layers.items():
        is_row = name == split.row
        if part is not None:
            weight = weight.chunk(split.num_parts, 1 if is_row else 0)[part]  # noqa: PLW2901 - this rank's
            bias = None if is_row or bias is None else bias.chunk(split.num_parts)[part]  # noqa: PLW2901
        run.leaves[f"{name}.weight"] = weight.detach().requires_grad_()
        if bias is not None:
            run.leaves[f"{name}.bias"] = bias.detach().requires_grad_()
        layer = module.get_submodule(name)
        mixture = values.mixture(int(layer.out_features if is_row else layer.in_features))  # type: ignore[arg-type]
        _stand_in(owner.get_submodule(name), _Layer(run, name, mixture, is_row=is_row, answers=answers))
    for attribute, count in split.counts.items():
        setattr(owner, attribute, count if part is not None else count * split.num_parts)
    owner.train(training)

    def given(tensor: Any) -> Any:
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


def _copy_of(module: nn.Module, split: Split, values: Values, run: Run) -> nn.Module:
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
    """Yield the tensors that modules hold, by name."""
    for name, module in owner.named_modules():
        held = {key: value for key, value in vars(module).items() if key not in TABLES}
        for place, leaf in enumerate(pytree.tree_leaves(held)):
            if isinstance(leaf, torch.Tensor):
                yield f"{name}[{place}]", leaf
        for key, buffer in module.named_buffers(recurse=False):
            yield f"{name}.{key}", buffer


class _InFloat64(DispatchMode):
    """Runs code that asks for lower precision in float64, and makes dropout keep everything."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.ops.aten.bernoulli_.float:
            return args[0].fill_(args[1] if len(args) > 1 else kwargs.get("p", 0.5))
        if kwargs.get("dtype") in _LOWER:
            kwargs["dtype"] = torch.float64
        output = func(*args, **kwargs)
        # A factory called without a dtype.
        return output.double() if isinstance(output, torch.Tensor) and output.dtype in _LOWER else output


@contextmanager
def aside() -> Generator[None]:
    """Run on the CPU in float64, and restore random numbers, warnings and the mode of autograd afterwards."""
    with ExitStack() as during:
        during.callback(random.setstate, random.getstate())
        # All ranks of a machine run trials at once, with small tensors: more threads would only wait for one another.
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
