# SPDX-License-Identifier: Apache-2.0
"""Running parts of a model whose weights are elsewhere: fetched when needed, the next part ahead of time.

While a part runs, its modules see fetched weights in place of their parameters; autograd keeps a note for backward of
where to fetch them again. Parameters stay registered, and gradients arrive at them. At most two parts are in memory.
Imported by place and hooks.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import nn

from rankwise.errors import ConfigurationError, RankwiseError
from rankwise.torch_private.autograd import (
    NO_GRAPH,
    graph_task,
    in_backward,
    innermost_saved_tensors_hooks,
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    run_after_backward,
    version_of,
)
from rankwise.torch_private.modules import own_parameters, update_flat_weights
from rankwise.torch_private.tensors import is_zero_tensor
from rankwise.world.device.streams import current_stream, new_stream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rankwise.place.units import Unit
    from rankwise.torch_private.autograd import Hooks


@dataclass(frozen=True, slots=True)
class _ParameterSlot:
    """A place where a module of a part holds a parameter."""

    module: ref[nn.Module]
    attribute: str
    number: int
    """Of the parameter that the module was placed with."""

    @property
    def parameter(self) -> torch.Tensor | None:
        """The tensor that is there now, perhaps put there by functional_call."""
        module = self.module()
        return None if module is None else own_parameters(module).get(self.attribute)


class OffloadedPart:
    """A part of a model, and the device it runs on. Only parameters are fetched.

    Refers to its modules weakly, since their hooks refer to it.
    """

    def __init__(self, unit: Unit, device: torch.device) -> None:
        self.name = unit.name
        self.device = device
        self.parameters = unit.parameters
        numbers = {id(parameter): number for number, parameter in enumerate(self.parameters)}
        self._places = [
            _ParameterSlot(ref(slot.module), slot.attribute, numbers[id(slot.tensor)])
            for slot in unit.slots
            if slot.is_parameter
        ]
        self._shown: list[tuple[_ParameterSlot, torch.Tensor | None]] = []

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that hold its parameters, each once."""
        return list({id(module): module for place in self._places if (module := place.module()) is not None}.values())

    @property
    def is_as_placed(self) -> bool:
        """Whether the modules still hold the parameters they were placed with."""
        return all(place.parameter is self.parameters[place.number] for place in self._places)

    def show(self, tensors: list[torch.Tensor]) -> None:
        """Have the modules see ``tensors`` in place of the parameters, which stay registered."""
        for place in self._places:
            self._show(place, tensors[place.number])

    def show_replaced(self) -> None:
        """Have the modules see the tensors they hold now, moved to the device of the part."""
        copies: dict[int, torch.Tensor] = {}
        for place in self._places:
            parameter = place.parameter
            if parameter is not None:
                if id(parameter) not in copies:
                    copies[id(parameter)] = parameter.to(self.device)
                self._show(place, copies[id(parameter)])

    def _show(self, place: _ParameterSlot, tensor: torch.Tensor) -> None:
        module = place.module()
        if module is not None:
            self._shown.append((place, place.parameter))
            # An attribute of the object hides what nn.Module.__getattr__ finds.
            module.__dict__[place.attribute] = tensor

    def hide(self) -> None:
        """Have the modules see their parameters again."""
        shown, self._shown = self._shown, []
        for place, _ in shown:
            module = place.module()
            if module is not None:
                module.__dict__.pop(place.attribute, None)
        for module in {module for place, _ in shown if isinstance(module := place.module(), nn.RNNBase)}:
            # torch keeps a list of the weights it ran with, which would keep the fetched ones alive.
            update_flat_weights(module)

    def check_shown(self, module: nn.Module) -> None:
        """Raise a ConfigurationError if a parameter of ``module`` was replaced while the part runs with the old one."""
        for place, parameter in self._shown:
            if place.module() is module and place.parameter is not parameter and place.attribute in vars(module):
                raise ConfigurationError(
                    f"{place.attribute} of a {type(module).__name__} was replaced while {self.name}, whose weights are "
                    "fetched, was running.",
                    do="replace parameters before the block is called (functional_call of the block, not of a layer in "
                    f"it), or assign {self.name} to the device that it runs on",
                )


@dataclass
class _Backward:
    """The part that backward is in, and its weights."""

    task: int = NO_GRAPH
    away: OffloadedPart | None = None
    data: list[torch.Tensor] = field(default_factory=list)


class Fetching:
    """The parts of one model that are fetched, and the order in which they are needed.

    Its many fields are one plan of what to fetch next: the parts that run, their order, and the part fetched ahead.

    Args:
        is_ahead: fetch the next part while one runs, so that two are in memory.
    """

    def __init__(self, *, is_ahead: bool) -> None:
        self._is_ahead = is_ahead
        self._lock = threading.RLock()
        self._ahead: _Ahead | None = None
        self._streams: dict[torch.device, torch.Stream | None] = {}
        self._is_running = False
        self._last: OffloadedPart | None = None
        self._after: dict[OffloadedPart, OffloadedPart] = {}
        self._before: dict[OffloadedPart, OffloadedPart] = {}
        self._after_in_backward: dict[OffloadedPart, OffloadedPart] = {}
        self._backward = _Backward()
        self._open: list[OffloadedPart] = []
        self._num_calls: Counter[OffloadedPart] = Counter()
        """The number of nested calls of each part that are running."""
        self._hooked: set[OffloadedPart] = set()

    def begin(self) -> None:
        """Begin a run of the whole model."""
        self._is_running = True
        if in_backward():
            return
        # Left by an interrupt, after which torch calls no hooks.
        for away in self._open[::-1]:
            del self._num_calls[away]
            self._close(away)
        self._after_backward()
        self._last = None

    def end(self) -> None:
        """End a run of the whole model."""
        self._is_running = False
        if not in_backward():
            self._forget()

    def enter(self, away: OffloadedPart, *, with_notes: bool = True) -> None:
        """Have a part see its weights on its device. Calls may be nested; each needs its :meth:`leave`.

        ``with_notes`` keeps notes for backward in place of weights. torch.utils.checkpoint requires as many tensors to
        be kept when it calls layers again as when they were called within their part.
        """
        self._num_calls[away] += 1
        if self._num_calls[away] > 1:
            return
        self._open.append(away)
        try:
            if away.is_as_placed:
                self._show(away, with_notes=with_notes)
            else:
                # Replaced parameters are not in the plan: backward keeps them like any tensor.
                away.show_replaced()
        except BaseException:
            self.leave(away)
            raise

    def _show(self, away: OffloadedPart, *, with_notes: bool) -> None:
        data = self._for_backward(away) if in_backward() else self._for_forward(away)
        track = torch.is_grad_enabled()
        away.show(
            [
                _Fetched.apply(parameter, tensor) if track and parameter.requires_grad else tensor
                for parameter, tensor in zip(away.parameters, data, strict=True)
            ]
        )
        if track and with_notes:
            push_saved_tensors_hooks(*_Keeping(self, away, data).hooks())
            self._hooked.add(away)

    def leave(self, away: OffloadedPart) -> None:
        """End what :meth:`enter` began."""
        if not self.is_running(away):
            return
        self._num_calls[away] -= 1
        if not self.is_running(away):
            self._close(away)

    def is_running(self, away: OffloadedPart) -> bool:
        """Return whether a call of the part is running."""
        return self._num_calls[away] > 0

    def _close(self, away: OffloadedPart) -> None:
        away.hide()
        if away in self._hooked:
            self._hooked.remove(away)
            pop_saved_tensors_hooks()
        if away in self._open:
            self._open.remove(away)

    def again(self, away: OffloadedPart) -> list[torch.Tensor]:
        """Return the weights of a part for backward."""
        if in_backward():
            return self._for_backward(away)
        return _copies(away)

    def _for_forward(self, away: OffloadedPart) -> list[torch.Tensor]:
        last, self._last = self._last, away
        if last is not None and last is not away:
            self._after[last] = away
            self._before[away] = last
        data = self._fetch(away)
        if self._is_running:
            self._fetch_ahead(self._after.get(away), away)
        return data

    def _for_backward(self, away: OffloadedPart) -> list[torch.Tensor]:
        task = graph_task()
        with self._lock:
            backward = self._backward
            if backward.task != task:
                self._backward = backward = _Backward(task)
                run_after_backward(self._after_backward)
            if backward.away is not away:
                if backward.away is not None:
                    self._after_in_backward[backward.away] = away
                backward.data = []
                backward.data = self._fetch(away)
                backward.away = away
                self._fetch_ahead(self._after_in_backward.get(away, self._before.get(away)), away)
            return backward.data

    def _after_backward(self) -> None:
        with self._lock:
            self._forget()
            self._backward = _Backward()

    def _fetch(self, away: OffloadedPart) -> list[torch.Tensor]:
        with self._lock:
            ahead, self._ahead = self._ahead, None
            if ahead is not None:
                data = ahead.wait()
                if ahead.away is away:
                    return data
                del data, ahead
            return _copies(away)

    def _fetch_ahead(self, following: OffloadedPart | None, running: OffloadedPart) -> None:
        if self._is_ahead and following is not None and following is not running and not self.is_running(following):
            device = following.device
            if device not in self._streams:
                # Created once: torch keeps freed memory separate for every stream.
                self._streams[device] = new_stream(device)
            self._ahead = _Ahead(following, self._streams.get(device))

    def _forget(self) -> None:
        with self._lock:
            ahead, self._ahead = self._ahead, None
            if ahead is not None:
                ahead.wait()


class _Ahead:
    """A part that is fetched by a thread."""

    def __init__(self, away: OffloadedPart, stream: torch.Stream | None) -> None:
        self.away = away
        self._data: list[torch.Tensor] = []
        self._error: BaseException | None = None
        self._stream = stream
        self._thread = threading.Thread(target=self._run, name="rankwise-fetch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            if self._stream is None:
                self._data = _copies(self.away)
                return
            with self._stream:
                self._data = _copies(self.away)
            self._stream.synchronize()
        except BaseException as error:  # noqa: BLE001 - raised where the weights are needed
            self._error = error

    def wait(self) -> list[torch.Tensor]:
        self._thread.join()
        if self._error is not None:
            raise self._error
        if self._stream is not None:
            for tensor in self._data:
                # Memory of another stream must not be reused while this one still reads it.
                tensor.record_stream(current_stream(self.away.device))
        data, self._data = self._data, []
        return data


class _Fetched(torch.autograd.Function):
    """The copy of a parameter on another device; its gradient goes back to the parameter."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        ctx.home = parameter.device
        return copy.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0].to(ctx.home), None


@dataclass(frozen=True, slots=True)
class _Note:
    """A fetched weight, or a view of one, that backward needs."""

    away: OffloadedPart
    number: int
    version: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class _Passed:
    """Another tensor that backward needs: packed by the hooks around ours, or as it is."""

    packed: Any
    unpack: Callable[[Any], torch.Tensor] | None
    version: int


class _Keeping:
    """The saved-tensor hooks while one part runs: notes for its weights, other tensors as usual."""

    def __init__(self, fetching: Fetching, away: OffloadedPart, data: Iterable[torch.Tensor]) -> None:
        self._fetching = fetching
        self._away = away
        self._numbers = {address: number for number, tensor in enumerate(data) if (address := _address(tensor))}
        self._dtypes = [parameter.dtype for parameter in away.parameters]
        # torch calls only the innermost hooks: these pass other tensors on, for example to torch.utils.checkpoint's.
        self._outer: Hooks | None = innermost_saved_tensors_hooks()

    def hooks(self) -> Hooks:
        return self._pack, self._unpack

    def _pack(self, tensor: torch.Tensor) -> object:
        number = self._numbers.get(_address(tensor))
        if number is None or tensor.dtype != self._dtypes[number]:
            if self._outer is not None:
                return _Passed(self._outer[0](tensor), self._outer[1], 0)
            return _Passed(tensor, None, version_of(tensor))  # torch compares it too, but not under hooks
        version = version_of(self._away.parameters[number])
        return _Note(self._away, number, version, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def _unpack(self, kept: _Note | _Passed) -> torch.Tensor:
        if isinstance(kept, _Passed):
            if kept.unpack is not None:
                return kept.unpack(kept.packed)
            _check_version(kept.packed, kept.version, "A value that backward needs")
            return kept.packed
        _check_version(kept.away.parameters[kept.number], kept.version, f"a weight of {kept.away.name}")
        data = self._fetching.again(kept.away)[kept.number]
        return data.as_strided(kept.shape, kept.stride, kept.offset)


def _address(tensor: torch.Tensor) -> int:
    """Return where a tensor's memory begins; 0 if it has none of its own, as a quantised weight, or no bytes."""
    if type(tensor) not in {torch.Tensor, nn.Parameter} or tensor.layout is not torch.strided:
        return 0
    if tensor.is_conj() or tensor.is_neg() or is_zero_tensor(tensor):
        return 0
    return tensor.untyped_storage().data_ptr()


def _check_version(tensor: torch.Tensor, version: int, what: str) -> None:
    if version_of(tensor) != version:
        raise RankwiseError(
            f"{what} was changed in place between forward and backward.".capitalize(),
            do="call backward before optimizer.step() and before any other in-place change",
        )


@torch.no_grad()
def _copies(away: OffloadedPart) -> list[torch.Tensor]:
    return [parameter.detach().to(away.device, copy=True) for parameter in away.parameters]
