# SPDX-License-Identifier: Apache-2.0
"""A model's forward pass as a list of calls: of its blocks, and of the functions between them.

Recorded by running the model's own ``forward`` once on tensors without data, so nothing is computed or changed. Knows
nothing of ranks or stages. Used by plan.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.overrides import TorchFunctionMode

from rankwise.comm.current_batch import CurrentBatch
from rankwise.errors import ConfigurationError
from rankwise.pipeline.stages import TARGET_WORDS, Program, ProgramCall, Ref, TensorKind
from rankwise.replicate.loss.batch_statistics import StatisticsTracer
from rankwise.replicate.random_numbers.batch_tracer import MeetingTracer, is_random
from rankwise.replicate.random_numbers.sample_layout import KnownLayout, SampleLayout
from rankwise.replicate.random_numbers.scope import DrawScope, is_apart
from rankwise.replicate.undo_forward import PythonRandomness, left_as_it_was
from rankwise.torch_private.autograd import version_of
from rankwise.torch_private.dtensor import own_part, placed_like
from rankwise.torch_private.kernels import DispatchMode
from rankwise.torch_private.modules import hide_backward_hooks, own_buffers, own_parameters
from rankwise.torch_private.tensors import (
    TreeSpec,
    mark_as_parameter,
    memory_key,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)
from rankwise.world.device.accelerator import autocast_state

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence

    from torch import nn

    from rankwise.torch_private.fake import FakeTensorMode
    from rankwise.torch_private.kernels import Operator

MOST_DEPTH = 4
"""Depth to which objects other than trees are searched for tensors."""


def trace(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    blocks: Iterable[str],
    device: torch.device,
    *,
    num_followed: int = 0,
) -> Program:
    """Return the calls of ``model(*args, **kwargs)``, without computing them.

    Sizes become constants: a program is valid for inputs of the same shapes, in the same mode of the model.

    Args:
        model: its parameters may be meta tensors.
        args: tensors, and trees of them.
        kwargs: likewise.
        blocks: names of the modules whose calls are not traced inside.
        device: the device that the parameters are assumed to be on.
        num_followed: samples of the arguments, to follow through the calls; 0 to follow none.

    Raises:
        ConfigurationError: forward depends on values, or cannot be traced.
    """
    from rankwise.torch_private import fake  # noqa: PLC0415 - takes long to import

    mode = fake.fake_tensors()
    recorder = _Recorder()
    tracer = _SampleTracer(num_followed)
    draws = tracer.plan_without_data(fake.FakeTensor, fake.outside_fake)
    leaves, spec = tree_flatten((tuple(args), kwargs))
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            leaves[index] = stand_in = fake.fake_of(mode, leaf.detach())
            recorder.program.inputs[recorder.number(stand_in)] = index
            if stand_in.dim():
                tracer.set_fact(stand_in, KnownLayout(SampleLayout(0)))
    own_args, own_kwargs = tree_unflatten(leaves, spec)
    names = list(blocks)
    # Hooks of the model itself may look at values, of which there are none.
    run = model if "" in names else model.forward
    with left_as_it_was(model):
        for module in model.modules():
            # torch would record them as a function around each block, without a gradient.
            hide_backward_hooks(module)
        handles = [handle for name in names for handle in recorder.follow(name, model.get_submodule(name))]
        try:
            modes = mode, recorder.randomness, recorder, *((tracer,) if num_followed else ())
            with _stood_in(model, mode, device, recorder), ExitStack() as entered:
                for one in modes:
                    entered.enter_context(one)
                output = run(*own_args, **own_kwargs)
            recorder.check_randomness()
            outputs = (leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor))
            recorder.program.note_samples(draws, map(tracer.statistic, outputs))
            return recorder.finish(output)
        except (fake.DataDependentOutputException, fake.DynamicOutputShapeException) as error:
            raise _depends_on_values(error, recorder.within) from error
        except fake.UnsupportedOperatorException as error:
            raise ConfigurationError(
                "The model calls an operator that cannot run on fake tensors.",
                evidence=str(error),
                do="register a fake implementation: torch.library.register_fake",
            ) from error
        finally:
            recorder.python_randomness.put_back()
            for handle in handles:
                handle.remove()


def _depends_on_values(error: Exception, within: str | None) -> ConfigurationError:
    if within is None:
        return ConfigurationError(
            "The control flow of the model depends on tensor values, so it cannot be divided into stages.",
            evidence=f"{error}, called outside blocks",
            do=TARGET_WORDS,
        )
    return ConfigurationError(
        f"The control flow of the block {within} depends on tensor values, so the shapes of its output are unknown.",
        evidence=f"{error}, called in {within}, which runs on fake tensors to determine the shapes of its output",
        do="avoid reading values, nonzero() and boolean indexing (use torch.where, torch.cond), or move those "
        "lines into a torch.library.custom_op with register_fake",
    )


class _Recorder(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.program = Program()
        self.randomness = _Randomness(self.program)
        self.python_randomness = PythonRandomness()
        self.within: str | None = None
        """The block that is running."""
        self._numbers: dict[int, int] = {}
        self._alive: list[torch.Tensor] = []
        self._split_states: dict[int, int] = {}
        self._next = 0
        self._num_drawn = 0
        """Before the current call."""
        self._depth = 0
        self._entered: tuple[list[Any], TreeSpec, list[int]] | None = None
        self._autocast = autocast_state()

    def number(self, tensor: torch.Tensor) -> int:
        number = self._next
        self._next += 1
        self._numbers[id(tensor)] = number
        self._alive.append(tensor)
        self.program.kinds[number] = _kind(tensor)
        return number

    def name_state(self, name: str, stand_in: torch.Tensor, tensor: torch.Tensor) -> None:
        """Register a parameter or buffer and its stand-in under one number."""
        number = self.number(stand_in)
        self._numbers[id(tensor)] = number
        if own_part(stand_in) is not stand_in:
            self._split_states[memory_key(own_part(stand_in))] = number
        self.program.states[number] = name

    def follow(self, name: str, module: nn.Module) -> list[Any]:
        """Record calls of a module as one call each."""

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._depth += 1
            if self._depth == 1:
                self.check_randomness()
                self.within = name
                leaves, spec = tree_flatten((args, kwargs))
                self._entered = leaves, spec, [_version(leaf) for leaf in leaves]

        def after(_: nn.Module, _args: tuple[Any, ...], _kwargs: dict[str, Any], output: object) -> None:
            if self._depth == 1 and self._entered is not None:
                self._write(name, *self._entered, output)
                self.python_randomness.put_back()
                self.within = None
            self._depth -= 1

        return [
            module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
            module.register_forward_hook(after, with_kwargs=True),
        ]

    def check_randomness(self) -> None:
        """Raise if forward has drawn numbers from Python or NumPy between blocks."""
        if self.python_randomness.has_moved():
            raise ConfigurationError(
                "forward draws random numbers from Python or NumPy between blocks.",
                evidence="the numbers drawn during tracing would be used in every step",
                do=f"draw with torch, or {TARGET_WORDS}",
            )

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._depth:
            return func(*args, **kwargs)
        if func is torch.Tensor.__iter__:
            return iter(self.__torch_function__(torch.unbind, types, args, kwargs))
        leaves, spec = tree_flatten((args, kwargs))
        versions = [_version(leaf) for leaf in leaves]
        self.randomness.was_seen = False
        result = func(*args, **kwargs)
        if any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(result)) or versions != [
            _version(leaf) for leaf in leaves
        ]:
            self._write(func, leaves, spec, versions, result)
        return result

    def _write(
        self,
        target: str | Callable[..., Any],
        leaves: list[Any],
        spec: TreeSpec,
        versions: list[int],
        result: object,
    ) -> None:
        if autocast_state() != self._autocast:
            raise ConfigurationError(
                f"{target} is called in a different autocast state than the model.",
                do="enter autocast around the whole step, or inside a block",
            )
        changed = [leaf for leaf, version in zip(leaves, versions, strict=True) if _version(leaf) != version]
        changes = tuple(self._numbers[id(leaf)] for leaf in changed if id(leaf) in self._numbers)
        self.program.kinds.update(
            (self._numbers[id(leaf)], _kind(leaf)) for leaf in changed if id(leaf) in self._numbers
        )
        stored = [self._stored(leaf, target) for leaf in leaves]
        is_whole = isinstance(result, torch.Tensor)
        tensors = [(index, leaf) for index, leaf in enumerate(tree_leaves(result)) if isinstance(leaf, torch.Tensor)]
        call = ProgramCall(
            target=target,
            leaves=stored,
            spec=spec,
            reads=tuple(leaf.number for leaf in stored if isinstance(leaf, Ref)),
            results=tuple((index, self.number(leaf)) for index, leaf in tensors),
            is_whole=is_whole,
            changes=changes,
            in_grad_mode=torch.is_grad_enabled(),
            is_random=self.randomness.was_seen and not isinstance(target, str),
            first_draw=self._num_drawn,
        )
        self._num_drawn = self.program.num_draws
        self.program.calls.append(call)

    def _stored(self, leaf: object, target: object) -> object:
        if isinstance(leaf, torch.Tensor):
            return self._ref(leaf, target)
        if _hides_fake(leaf):
            raise ConfigurationError(
                f"{target} receives a {type(leaf).__name__} that contains tensors, which cannot be sent between "
                "stages.",
                do="pass tensors, or lists, tuples and dicts of them; disable key-value caches: use_cache=False",
            )
        return leaf

    def _ref(self, tensor: torch.Tensor, target: object) -> Ref:
        number = self._numbers.get(id(tensor))
        # The result of an autograd.Function was seen within it, where gradients are off.
        if number is None or self.program.kinds[number].requires_grad != tensor.requires_grad:
            state = self._split_states.get(memory_key(own_part(tensor)))
            if state is not None:
                return Ref(self._write_own_part(state, tensor))
            if _is_fake(own_part(tensor)):
                raise ConfigurationError(
                    f"{target} receives a {list(tensor.shape)} tensor of unknown origin.",
                    evidence="it is the result of an autograd.Function outside of blocks, or was kept by a block",
                    do=TARGET_WORDS,
                )
            number = self.number(tensor)
            self.program.constants[number] = tensor
        return Ref(number)

    def _write_own_part(self, state: int, tensor: torch.Tensor) -> int:
        """Record ``to_local`` of a parameter, which torch does not report as a function call."""
        leaves, spec = tree_flatten(((Ref(state),), {}))
        number = self.number(tensor)
        call = ProgramCall(
            _own_part_of, leaves, spec, (state,), ((0, number),), True, (), torch.is_grad_enabled(), False
        )
        self.program.calls.append(call)
        return number

    def finish(self, output: object) -> Program:
        leaves, spec = tree_flatten(output)
        self.program.end([self._stored(leaf, "the output of forward") for leaf in leaves], spec)
        self._alive.clear()
        return self.program


class _SampleTracer(StatisticsTracer):
    """Follows samples without data, and notes which of them each random number is for."""

    is_graph_read = False  # of other stages

    def __init__(self, num_samples: int) -> None:
        rows = CurrentBatch(0, 0, 0, num_samples, num_samples, 0)
        super().__init__(rows)
        self._scope = DrawScope(rows, "counter", 0)

    def _draw(self, call: Any, found: Any, *, is_lost: bool = False) -> Any:
        return super(MeetingTracer, self)._draw(call, found, is_lost=is_lost)  # which leaves draws to torch


class _Randomness(DispatchMode):
    """Notices random operators: other ranks cannot draw the same numbers again."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.was_seen = False
        self._program = program
        self._has_graph = torch.is_grad_enabled()

    def __torch_dispatch__(
        self, func: Operator, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if is_random(func):
            self.was_seen = True
            shape = next(tuple(one.shape) for one in tree_leaves(out) if isinstance(one, torch.Tensor))
            self._program.note_draw(shape, is_apart=is_apart(has_graph=self._has_graph))
        return out


def tensor_places(model: nn.Module) -> Generator[tuple[str, dict[str, Any], str, torch.Tensor]]:
    """Yield every place of each parameter and buffer: its name, the table that holds it, the key there, the tensor."""
    for path, module in model.named_modules():
        tables = (own_parameters(module), own_buffers(module))
        for table in cast("tuple[dict[str, Any], ...]", tables):
            for key, tensor in table.items():
                if tensor is not None:
                    yield f"{path}.{key}" if path else key, table, key, tensor


@contextmanager
def _stood_in(model: nn.Module, mode: FakeTensorMode, device: torch.device, recorder: _Recorder) -> Generator[None]:
    """Replace the parameters and buffers of ``model`` with tensors without data."""
    stand_ins: dict[int, torch.Tensor] = {}
    swapped = list(tensor_places(model))
    for name, _, _, tensor in swapped:
        if id(tensor) not in stand_ins:
            stand_ins[id(tensor)] = stand_in = _stand_in(tensor, mode, device)
            recorder.name_state(name, stand_in, tensor)
    try:
        for _, table, key, tensor in swapped:
            table[key] = stand_ins[id(tensor)]
        yield
        replaced = [name for name, table, key, tensor in swapped if table.get(key) is not stand_ins[id(tensor)]]
        if replaced:
            raise ConfigurationError(
                f"forward replaces {replaced[0]}, which pipeline() does not support.",
                evidence=f"replaced: {', '.join(replaced)}",
                do="change it in place: self.buffer.copy_(...)",
            )
        recorder.program.note_changed(name for name, *_, tensor in swapped if _version(stand_ins[id(tensor)]) > 0)
    finally:
        for _, table, key, tensor in swapped:
            table[key] = tensor


def _stand_in(tensor: torch.Tensor, mode: FakeTensorMode, device: torch.device) -> torch.Tensor:
    part = own_part(tensor)
    with mode:
        stand_in = torch.empty_strided(part.size(), part.stride(), dtype=part.dtype, device=device)
    if part is not tensor:
        stand_in = placed_like(tensor, stand_in, requires_grad=tensor.requires_grad)
    stand_in.requires_grad_(tensor.requires_grad)
    if isinstance(tensor, torch.nn.Parameter):
        mark_as_parameter(stand_in)
    return stand_in


def _kind(tensor: torch.Tensor) -> TensorKind:
    part = own_part(tensor)
    is_plain = part is tensor and part.layout is torch.strided
    # empty_like gives strides without gaps: the tensor's own if it has none.
    stride = torch.empty_like(part, device="meta").stride() if is_plain else ()
    storage = memory_key(part) if is_plain else -1
    return TensorKind(tuple(part.shape), tuple(stride), part.dtype, tensor.requires_grad, storage, is_plain)


def _own_part_of(parameter: Any) -> torch.Tensor:  # a DTensor, whose import takes long
    return parameter.to_local()


def _hides_fake(value: object, depth: int = 0) -> bool:
    """Return whether an object contains a tensor of this run, as a cache of keys and values does."""
    if isinstance(value, torch.Tensor):
        return _is_fake(own_part(value))
    if depth == MOST_DEPTH or isinstance(value, torch.nn.Module | type):
        return False
    if isinstance(value, list | tuple | set):
        inner = list(cast("Sequence[object]", value))
    elif isinstance(value, dict):
        inner = list(cast("dict[object, object]", value).values())
    else:
        inner = list(getattr(value, "__dict__", {}).values())
    return any(_hides_fake(one, depth + 1) for one in inner)


def _is_fake(value: object) -> bool:
    from rankwise.torch_private.fake import FakeTensor  # noqa: PLC0415 - takes long to import

    return isinstance(value, FakeTensor)


def _version(leaf: object) -> int:
    return version_of(own_part(leaf)) if isinstance(leaf, torch.Tensor) else 0
