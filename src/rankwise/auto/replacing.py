# SPDX-License-Identifier: Apache-2.0
"""Functions that are replaced while a script runs: of process groups, which it must not find, gradients, signals."""

from __future__ import annotations

import inspect
import signal
import sys
from contextlib import contextmanager
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd import functional

from rankwise.auto.code_reads import is_of_script
from rankwise.errors import ConfigurationError
from rankwise.health.call_site import responsible_module, user_call_site, words

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from contextlib import AbstractContextManager
    from types import FrameType

    Replaced = list[tuple[object, str, Any]]
    """Objects, names of their attributes, and the values before."""


def replace_attributes(owner: object, names: Sequence[str], make: Callable[[Any], Any]) -> Replaced:
    """Replace attributes, and return what they were.

    Args:
        owner: a module or a class.
        names: of its attributes. Those that it does not have are left out.
        make: returns the new value for the old one.
    """
    before: Replaced = [(owner, name, getattr(owner, name)) for name in names if hasattr(owner, name)]
    for _, name, value in before:
        setattr(owner, name, make(value))
    return before


@contextmanager
def replaced(*changes: tuple[object, Sequence[str], Callable[[Any], Any]]) -> Generator[None]:
    """Replace attributes inside the block; ``changes`` are the arguments of :func:`replace_attributes`."""
    before: Replaced = []
    try:
        for change in changes:
            before += replace_attributes(*change)
        yield
    finally:
        for owner, name, value in reversed(before):
            setattr(owner, name, value)


_MEANS = ("rankwise.health.", "rankwise.auto.", "rankwise.verify.")


def calling_module() -> str:
    """Return the name of the module that calls; Python's and NumPy's are passed over.

    It is ``__main__`` for the script and for modules in its folder.
    """
    name = responsible_module(_MEANS)
    return "__main__" if is_of_script(name) else name


def group_hidden() -> AbstractContextManager[None]:
    """Have the script find no process group inside the block, and be unable to open one."""
    return replaced(
        (dist, ["init_process_group"], lambda _: _opens_group),
        (dist, ["is_initialized"], partial(_for_script, lambda: False)),
        (dist, ["get_rank", "get_world_size"], partial(_for_script, _has_no_group)),
    )


def _for_script(answer: Callable[[], Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that answers the script and its libraries; torch and rankwise get torch's own answer."""

    def call(*args: Any, **kwargs: Any) -> Any:
        is_own = calling_module().partition(".")[0] in {"torch", "rankwise"}
        return function(*args, **kwargs) if is_own else answer()

    return call


def _has_no_group() -> None:
    raise ValueError("Default process group has not been initialized, please make sure to call init_process_group.")


def _opens_group(*_: Any, **__: Any) -> None:
    raise ConfigurationError(
        "The script opens a process group of its own, but --auto runs scripts for one device.",
        where=words(user_call_site()),
        do="run it without --auto",
    )


def one_by_one() -> AbstractContextManager[None]:
    """Compute gradients one by one inside the block, in ``autograd.grad`` and ``autograd.functional``."""
    return replaced((torch.autograd, ["grad"], _without_batches), (functional, ["jacobian"], _without_vmap))


def _without_batches(grad: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(grad)

    @wraps(grad)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        batched = given.pop("grad_outputs", None)
        if not given.pop("is_grads_batched", False) or batched is None:
            return grad(*args, **kwargs)
        batched = [batched] if isinstance(batched, torch.Tensor) else list(batched)
        number = next(len(one) for one in batched if one is not None)
        keeps = given.pop("retain_graph", None)
        keeps = given.get("create_graph", False) if keeps is None else keeps
        found = [
            grad(
                grad_outputs=[None if one is None else one[place] for one in batched],
                retain_graph=keeps or place + 1 < number,
                **given,
            )
            for place in range(number)
        ]
        return tuple(None if parts[0] is None else torch.stack(parts) for parts in zip(*found, strict=True))

    return call


def _without_vmap(jacobian: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(jacobian)

    @wraps(jacobian)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        # In forward mode nothing is split.
        if given.get("strategy", "reverse-mode") == "reverse-mode":
            given["vectorize"] = False
        return jacobian(**given)

    return call


class _Waiting(NamedTuple):
    """A handler as it is registered instead of the script's."""

    signals: HeldSignals
    handler: Callable[[int, FrameType | None], object]

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.signals.depth:
            self.signals.arrived.append((number, self.handler))
        else:
            self.handler(number, frame)


class HeldSignals:
    """Holds back handlers inside a ``with`` block of it. Used by: the main thread."""

    def __init__(self) -> None:
        self.depth = 0
        self.arrived: list[tuple[int, Callable[[int, FrameType | None], object]]] = []

    @contextmanager
    def replacing(self) -> Generator[None]:
        """Be able to hold back the handlers there are, and those that the script sets inside the block."""
        set_handler, get_handler = signal.signal, signal.getsignal

        def set_waiting(number: int, handler: Any) -> Any:
            return _of_script(set_handler(number, _Waiting(self, handler) if callable(handler) else handler))

        before = {number: get_handler(number) for number in signal.valid_signals()}
        for number, handler in before.items():
            if callable(handler):
                set_waiting(number, handler)
        with replaced(
            (signal, ["signal"], lambda _: set_waiting),
            (signal, ["getsignal"], lambda _: lambda number: _of_script(get_handler(number))),
        ):
            yield

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1
        if not self.depth:
            self._handle(sys._getframe(1))  # noqa: SLF001 - the documented name

    def _handle(self, frame: FrameType) -> None:
        """Run the handlers of the signals that have arrived, also those after one that raises."""
        if self.arrived:
            number, handler = self.arrived.pop(0)
            try:
                handler(number, frame)
            finally:
                self._handle(frame)


def _of_script(handler: Any) -> Any:
    return handler.handler if isinstance(handler, _Waiting) else handler
