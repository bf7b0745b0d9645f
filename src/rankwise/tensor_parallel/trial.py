# SPDX-License-Identifier: Apache-2.0
"""Whether a module computes the same when layers of it are split, found by running it both ways.

It runs with random parameters, in float64 on the CPU, and is restored afterwards: once whole, and once as each of two
ranks would run it. The split is right if outputs and gradients agree to rounding. Used by plan.
"""

from __future__ import annotations

import warnings
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the usual name

from rankwise.replicate.undo_forward import PythonRandomness, left_as_it_was
from rankwise.tensor_parallel.example_inputs import example_inputs
from rankwise.torch_private.kernels import DispatchMode
from rankwise.torch_private.modules import TABLES, own_buffers, own_parameters
from rankwise.torch_private.tensors import tree_flatten, tree_leaves, tree_unflatten

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    Inputs = tuple[list[Any], dict[str, Any]]

SPLIT_TOLERANCE = 1e-10
"""The largest allowed difference of results, relative to the largest of them or to 1."""
MAX_ELEMENTS = 2**27
"""The parameters next to the layers to split, which are copied whole, may have so many elements."""
PARTS = 2
"""So many ranks are tried: more would do the same with other parts."""
_RANK = 64
"""Weights of the layers are products of two matrices with so many features between: large ones take long to fill.

Each element of an output still depends on every input, so a wrong split still gives other results.
"""
_LOWER = {torch.float32, torch.float16, torch.bfloat16}


@dataclass(frozen=True)
class Split:
    """Layers of which each rank has a part, and the sizes used in the trial."""

    columns: tuple[str, ...]
    """Linear layers that are split by their outputs, by name within the module."""
    row: str
    """The one that is split by its inputs."""
    features: Mapping[str, int]
    """By layer: outputs of a column on one rank, inputs of the row."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Attributes of the module that count heads, and their values on one rank."""
    heads: int = 0
    """Heads on one rank: outputs after the first, [batch, heads, ...], may belong to these."""


class Differs(Exception):
    """A module cannot be split, or not in this way: the message says why."""

    def __init__(self, why: str, *, has_run: bool = True) -> None:
        super().__init__(why)
        self.has_run = has_run
        """Whether the sizes that were tried are such that the whole module runs."""


def follow(
    module: nn.Module, names: Sequence[str], head_sizes: Sequence[int]
) -> tuple[Inputs, dict[str, dict[str, None]]]:
    """Return an input that the module takes, and which of the linear layers ``names`` feed which.

    For each that is called, in this order: the layers whose outputs its input is computed from, without others between.

    Raises:
        Differs: there is no such input.
    """
    layers = [module.get_submodule(name) for name in names]
    why: str | None = None
    with aside():
        shapes = {name: shape_of(one) for name, one in zip(names, layers, strict=True) if is_linear(one)}
        values = _Values(module, shapes, unused=0.01)
        for inputs in example_inputs(module, [*dict.fromkeys(shape_of(one)[1] for one in layers)], head_sizes):
            run = _Run(followed=names)
            try:
                _run(module, values, inputs, run)
            except Exception as error:  # noqa: BLE001 - a wrong guess raises anything
                why = why or f"no input was found that its code takes: {_first_line(error)}"
                continue
            if run.outputs and all(one.isfinite().all() for one in run.outputs.values()):
                return inputs, run.feeds
            why = "its output is not finite" if run.outputs else "it returns no tensors"
    raise Differs(why or "no input was found that its code takes")


def check_split(module: nn.Module, split: Split, inputs: Inputs) -> None:
    """Compare both ways: in evaluation with gradients, in training without.

    Raises:
        Differs: they do not agree.
    """
    shapes: dict[str, tuple[int, int]] = {}
    for name, features in split.features.items():
        outputs, width = shape_of(module.get_submodule(name))
        shapes[name] = (outputs, features * PARTS) if name == split.row else (features * PARTS, width)
    with aside():
        # Only calls of the layers are split. Other uses of a weight, which keeps its shape, give NaN.
        values = _Values(module, shapes, unused=torch.nan)
        try:
            whole, parts, compared = _both(module, split, values, inputs)
            for run in (whole, *parts):
                _backward(run, compared)
            _check_gradients(whole, parts)
            with torch.no_grad():
                _both(module, split, values, inputs, training=True)
        except Differs:
            raise
        except Exception as error:
            raise Differs(f"its code does not run on a part: {_first_line(error)}") from error


def is_linear(module: object) -> bool:
    """Return whether a module computes as ``nn.Linear`` does, and has no other parameters (as an adapter has)."""
    return (
        isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and "forward" not in vars(module)
        and {name for name, _ in module.named_parameters()} <= {"weight", "bias"}
    )


def shape_of(linear: Any) -> tuple[int, int]:
    """Return the outputs and inputs of a linear layer, whose weight may be packed or not initialized yet."""
    return int(linear.out_features), int(linear.in_features)


# -- both ways -----------------------------------------------------------------------------------------


@dataclass
class _Run:
    split: Split | None = None
    whole: _Run | None = None
    """The run that this one is a part of."""
    part: int = 0
    followed: Sequence[str] = ()
    """Layers whose inputs are followed back to one another."""
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    """What it returns, and tensors that the modules hold afterwards, without parameters."""
    shares: list[torch.Tensor] = field(default_factory=list)
    """By call of the row: its output without the bias, which parts add up to."""
    answers: list[torch.Tensor] = field(default_factory=list)
    """By call of the row: its output."""
    entering: dict[int, torch.Tensor] = field(default_factory=dict)
    """By call of a column: the gradient of its input, which parts add up to."""
    leaves: dict[str, torch.Tensor] = field(default_factory=dict)
    """What has gradients, by name."""
    feeds: dict[str, dict[str, None]] = field(default_factory=dict)
    nodes: dict[object, str] = field(default_factory=dict)
    """The layers by the nodes of autograd's graph that computed their outputs."""
    calls: list[str] = field(default_factory=list)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return the gradients; zeros where there is none."""
        return {name: torch.zeros_like(one) if one.grad is None else one.grad for name, one in self.leaves.items()}

    def call(self, name: str, first: torch.Tensor, second: torch.Tensor, x: torch.Tensor, /) -> torch.Tensor:
        """Compute a layer; where ranks communicate, a part gets what the whole run had, and its share is compared.

        So parts can run one after another, and errors do not spread.
        """
        self.calls.append(name)
        bias = self.leaves.get(f"{name}.bias")
        if self.split is None or name != self.split.row:
            if self.split is not None and x.requires_grad:
                x = x.clone()
                x.register_hook(self._entered(len(self.calls)))
            return F.linear(F.linear(x, first), second, bias)
        share = F.linear(F.linear(x, first), second)
        number = len(self.shares)
        self.shares.append(share.detach())
        if self.whole is not None:
            return self.whole.answers[number] + (share - share.detach())
        answer = share if bias is None else share + bias
        self.answers.append(answer.detach().clone())
        return answer

    def follow(self, name: str, forward: Callable[..., torch.Tensor], x: torch.Tensor, /) -> torch.Tensor:
        """Compute a layer, and note which others its input is computed from."""
        found = self.feeds.setdefault(name, {})
        waiting, seen = [x.grad_fn], set[object]()
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if node in self.nodes:
                found[self.nodes[node]] = None
            else:
                waiting.extend(one for one, _ in node.next_functions)
        output = forward(x)
        self.nodes[output.grad_fn] = name
        return output

    def _entered(self, number: int) -> Callable[[torch.Tensor], torch.Tensor | None]:
        def hook(gradient: torch.Tensor) -> torch.Tensor | None:
            self.entering[number] = gradient
            return None if self.whole is None else self.whole.entering[number]

        return hook


def _both(
    module: nn.Module, split: Split, values: _Values, inputs: Inputs, *, training: bool = False
) -> tuple[_Run, list[_Run], set[str]]:
    """Return the runs whole and as each rank, and the names of the outputs that every rank has whole."""
    whole = _Run(split)
    try:
        _run(module, values, inputs, whole, training=training)
    except Exception as error:
        raise Differs(f"its code does not run on a part: {_first_line(error)}", has_run=False) from error
    if missing := next((name for name in (split.row, *split.columns) if name not in whole.calls), None):
        raise Differs(f"its code does not call {missing}")
    if not all(one.isfinite().all() for one in whole.outputs.values()):
        raise Differs("its output is not finite, as where its code uses the weight of a layer itself")
    parts = [_Run(split, whole, number) for number in range(PARTS)]
    for part in parts:
        _run(module, values, inputs, part, training=training)
        if part.calls != whole.calls or part.outputs.keys() != whole.outputs.keys():
            raise Differs("its code does something else on a part")
    return whole, parts, _check_outputs(split, whole, parts)


def _check_outputs(split: Split, whole: _Run, parts: list[_Run]) -> set[str]:
    for shares, expected in zip(zip(*(part.shares for part in parts), strict=True), whole.shares, strict=True):
        if not _is_close(torch.stack(shares).sum(0), expected):
            raise Differs(f"the parts of {split.row} do not add up: its code mixes what lies between or uses its size")
    compared = {name for name, one in whole.outputs.items() if one.is_floating_point()}
    for part in parts:
        for name, expected in whole.outputs.items():
            if not _is_close(part.outputs[name], expected):
                if name == "output 0" or not _are_own_heads(split, part.part, part.outputs[name], expected):
                    raise Differs("it is another where it has a part: its code returns or keeps what lies between")
                compared.discard(name)
    return compared


def _are_own_heads(split: Split, rank: int, found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether an output, [batch, heads, ...], is one rank's part of the heads, as attention weights are."""
    heads = split.heads * PARTS
    if not heads or expected.ndim < 3 or expected.shape[1] != heads:  # noqa: PLR2004 - batch, heads and more
        return False
    return _is_close(found, expected.chunk(PARTS, 1)[rank])


def _backward(run: _Run, compared: set[str]) -> None:
    generator = torch.Generator("cpu").manual_seed(2)
    losses: list[torch.Tensor] = []
    for name, output in run.outputs.items():
        if name in compared and output.requires_grad:
            weight = torch.randn(output.shape, generator=generator, dtype=output.dtype)
            losses.append((output * weight).sum())
    torch.autograd.backward(losses)


def _check_gradients(whole: _Run, parts: list[_Run]) -> None:
    expected = whole.gradients()
    scale = max((float(one.abs().max()) for one in expected.values() if one.numel()), default=0.0)
    for number, gradient in whole.entering.items():
        if not _is_close(torch.stack([part.entering[number] for part in parts]).sum(0), gradient, scale):
            raise Differs("the gradients of its parts do not add up")
    for part in parts:
        for name, gradient in part.gradients().items():
            if not _is_close(gradient, _own(part, name, expected[name]), scale):
                raise Differs(f"each rank would have another gradient of its {name}")


def _own(run: _Run, name: str, value: torch.Tensor) -> torch.Tensor:
    """Return a part's own piece of what belongs to a split layer, and everything else as it is."""
    layer, split = name.rpartition(".")[0], run.split
    if split is None or run.whole is None or layer not in split.features:
        return value
    return value.chunk(PARTS, 1 if layer == split.row else 0)[run.part]


def _is_close(found: torch.Tensor, expected: torch.Tensor, scale: float = 0.0) -> bool:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if not found.is_floating_point() and not found.is_complex():
        return torch.equal(found, expected)
    finite = expected.abs()[expected.isfinite()]
    scale = max(1.0, scale, float(finite.max()) if finite.numel() else 0.0)
    return torch.allclose(found, expected, rtol=0.0, atol=SPLIT_TOLERANCE * scale)


# -- one run -------------------------------------------------------------------------------------------


class _Values:
    """Random parameters, the same for all runs; those of linear layers have the shapes that are tried."""

    def __init__(self, module: nn.Module, shapes: Mapping[str, tuple[int, int]], *, unused: float) -> None:
        self._generator = torch.Generator("cpu").manual_seed(0)
        self.layers: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = {}
        """The two factors of each layer's weight, and its bias."""
        standing = {module.get_submodule(name) for name in shapes}
        others = {one for other in {*module.modules()} - standing for one in other.parameters(recurse=False)}
        if sum(one.numel() for one in others) > MAX_ELEMENTS:
            raise Differs(f"it has other parameters of more than {MAX_ELEMENTS} elements, too many to try it on a copy")
        for name, (outputs, width) in shapes.items():
            bias = None if own_parameters(module.get_submodule(name))["bias"] is None else self._random((outputs,))
            self.layers[name] = self._random((_RANK, width)), self._random((outputs, _RANK)), bias
        self.tensors: dict[torch.Tensor, torch.Tensor] = {}
        """Others by the original; those of the layers may be shared, or read, and keep their shape."""
        self.read: set[torch.Tensor] = set()
        for one in module.modules():
            for parameter in one.parameters(recurse=False):
                if one not in standing:
                    self.tensors[parameter] = self._random(tuple(parameter.shape), parameter.dtype)
                elif parameter not in self.tensors:
                    self.tensors[parameter] = torch.full((), unused, dtype=torch.float64).expand(parameter.shape)
                    self.read.add(parameter)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a buffer, or another tensor that is not a parameter, as the runs have it."""
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


def _run(module: nn.Module, values: _Values, inputs: Inputs, run: _Run, *, training: bool = False) -> None:
    """Run the module with other parameters on copies of the inputs, and note the results in ``run``."""
    split = run.split
    with left_as_it_was(module):
        _fill(module, values, run)
        for name, (first, second, bias) in values.layers.items():
            # Only one factor is split, and has gradients as the weight would.
            weights, key = [first, second], int(split is None or name != split.row)
            weights[key] = run.leaves[f"{name}.weight"] = _own(run, f"{name}.weight", weights[key]).detach()
            if bias is not None and (run.whole is None or key):
                run.leaves[f"{name}.bias"] = _own(run, f"{name}.bias", bias).detach()
            _replace_forward(module.get_submodule(name), partial(run.call, name, *weights))
        for name in run.followed:
            layer = module.get_submodule(name)
            _replace_forward(layer, partial(run.follow, name, layer.forward))
        for attribute, count in split.counts.items() if split is not None else ():
            setattr(module, attribute, count * (PARTS if run.whole is None else 1))
        module.train(training)
        leaves, spec = tree_flatten(inputs)
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                leaves[place] = leaf.detach().clone()
                if leaf.requires_grad:
                    run.leaves[f"input {place}"] = leaves[place]
        for leaf in run.leaves.values():
            leaf.requires_grad_()
        # Code may change its inputs in place.
        leaves = [one.clone() if isinstance(one, torch.Tensor) else one for one in leaves]
        args, kwargs = tree_unflatten(leaves, spec)
        torch.default_generator.manual_seed(0)
        output = module(*args, **kwargs)
        run.outputs = {f"output {place}": one for place, one in enumerate(_tensors(output))}
        for name, one in module.named_modules() if run.outputs else ():
            held = {key: value for key, value in vars(one).items() if key not in {*TABLES, "forward"}}
            kept = _tensors([held, [*one.buffers(recurse=False)]])
            run.outputs |= {f"{name}[{place}]": tensor for place, tensor in enumerate(kept)}


def _tensors(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _fill(module: nn.Module, values: _Values, run: _Run) -> None:
    """Replace the tensors of a module; parameters become leaves of ``run``, but for those of the linear layers."""
    made: dict[torch.Tensor, nn.Parameter] = {}
    for name, one in module.named_modules():
        for key, value in list(vars(one).items()):
            if isinstance(value, torch.Tensor):
                vars(one)[key] = values.of(value)
        for key, parameter in one.named_parameters(recurse=False, remove_duplicate=False):
            if parameter not in made:
                made[parameter] = nn.Parameter(values.tensors[parameter].detach(), requires_grad=False)
                if made[parameter].is_floating_point() and parameter not in values.read:
                    run.leaves[f"{name}.{key}".lstrip(".")] = made[parameter]
            own_parameters(one)[key] = made[parameter]
        for key, buffer in one.named_buffers(recurse=False, remove_duplicate=False):
            own_buffers(one)[key] = values.of(buffer)


def _replace_forward(module: nn.Module, forward: Callable[..., torch.Tensor]) -> None:
    module.forward = forward


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


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
        during.callback(PythonRandomness().put_back)
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
