# SPDX-License-Identifier: Apache-2.0
"""Random numbers that belong to rows: dropout's masks and noise move with the rows of a batch, or come from N ranks.

Used in a run whose batches are permuted or joined, so that its masks are those of the run that it is compared with.
Only calls of torch's own functions are followed; ``drew_by_rows`` says whether that was all that a model drew.
"""

from __future__ import annotations

import zlib
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from rankwise.auto.replacing import replace_attributes
from rankwise.tensors.arrays import memory_of
from rankwise.verify.sketches import permutation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_DRAWING = (
    (functional, ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")),
    (torch, ("dropout", "randn_like", "rand_like", "bernoulli", "randn", "rand")),
)
"""Functions of a tensor, or of a size, whose first dim may be the rows."""


State = tuple[torch.Tensor, ...]
"""Of torch's generators: the processor's, and the accelerator's if the process uses one."""


def _generators() -> list[torch.Generator]:
    kind = torch.accelerator.current_accelerator()
    module = None if kind is None else torch.get_device_module(kind)
    is_initialized = getattr(module, "is_initialized", None)
    if is_initialized is None or not is_initialized():
        return [torch.default_generator]
    of_devices = getattr(module, "default_generators", ())
    return [torch.default_generator, *of_devices[torch.accelerator.current_device_index() :][:1]]


def torch_state() -> State:
    """Return the state of torch's generators."""
    return tuple(one.get_state() for one in _generators())


def set_torch_state(state: State) -> None:
    """Put torch's generators into a state that :func:`torch_state` returned."""
    for generator, own in zip(_generators(), state, strict=False):
        generator.set_state(own)


def torch_digest() -> int:
    """Return a digest of the state of torch's generators alone."""
    digest = 0
    for one in torch_state():
        digest = zlib.crc32(memory_of(one.cpu()), digest)
    return digest


class RowDraws:
    """The draws of one process: during a call of a model, from :meth:`begin` to :meth:`end`."""

    def __init__(self, *, permutes: bool) -> None:
        self._permutes = permutes
        self._is_permuted = permutes
        self._rows: int | None = None
        self._parts: Sequence[int] = ()
        self._states: list[State] = []
        self._digest = 0
        self._before = 0
        self._is_by_rows = True
        self._is_inside = False

    def install(self) -> None:
        """Replace torch's functions that draw, before the script imports them."""
        for module, names in _DRAWING:
            replace_attributes(module, names, self._by_rows)

    def begin(
        self, rows: int, parts: Sequence[int] = (), states: Sequence[State] = (), *, is_permuted: bool = True
    ) -> None:
        """Begin a call of a model.

        Args:
            rows: samples of the batch.
            parts: of each rank whose batch was joined into this one.
            states: the state of torch's generators on each of these ranks; empty if they drew nothing.
            is_permuted: whether the rows are permuted in a run that permutes: only batches of loaders are.
        """
        self._is_permuted = self._permutes and is_permuted
        self._rows = rows
        self._parts = parts
        self._states = list(states)
        self._before = self._digest = torch_digest()
        self._is_by_rows = True

    def end(self) -> tuple[bool, bool]:
        """End the call; return whether it drew, and whether all that it drew belonged to rows."""
        self._rows = None
        now = torch_digest()
        return now != self._before, self._is_by_rows and now == self._digest

    def _by_rows(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def draw(*args: Any, **kwargs: Any) -> Any:
            if self._rows is None or self._is_inside:
                return original(*args, **kwargs)
            self._is_inside = True
            try:
                return self._draw(original, args, kwargs)
            finally:
                self._is_inside = False

        return draw

    def _draw(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        rows = _rows_of(args, kwargs)
        if torch_digest() != self._digest:
            self._is_by_rows = False
        if rows != self._rows or not rows:
            result = original(*args, **kwargs)
            if torch_digest() != self._digest:
                self._is_by_rows = False
        elif self._states and sum(self._parts) == rows:
            result = self._draw_for_ranks(original, args, kwargs)
        elif self._is_permuted:
            first, order = args[0], permutation(rows)
            if isinstance(first, torch.Tensor):
                order = order.to(first.device)
                args = (first[order.argsort()], *args[1:])
            result = original(*args, **kwargs)
            result = result[order.to(result.device)]
        else:
            result = original(*args, **kwargs)
        self._digest = torch_digest()
        return result

    def _draw_for_ranks(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        own = torch_state()
        results: list[Any] = []
        start = 0
        for rank, size in enumerate(self._parts):
            set_torch_state(self._states[rank])
            results.append(original(*_part(args, start, size), **kwargs))
            self._states[rank] = torch_state()
            start += size
        set_torch_state(own)
        return torch.cat(results)


def _rows_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    first = args[0] if args else None
    if isinstance(first, torch.Tensor):
        return first.shape[0] if first.dim() and not kwargs.get("inplace") else None
    size = first[0] if isinstance(first, list | tuple) and first else first
    return size if isinstance(size, int) and kwargs.get("generator") is None else None


def _part(args: tuple[Any, ...], start: int, size: int) -> tuple[Any, ...]:
    """Return the arguments for some rows: of the tensor, or of the size."""
    if isinstance(args[0], torch.Tensor):
        return (args[0][start : start + size], *args[1:])
    if isinstance(args[0], list | tuple):
        return ((size, *args[0][1:]), *args[1:])
    return (size, *args[1:])
