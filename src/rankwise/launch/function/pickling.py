# SPDX-License-Identifier: Apache-2.0
"""What travels between a caller and its ranks: functions, values and exceptions, pickled by value.

Nothing that came over a network is unpickled here. Imported by the launch of a function, at both ends;
cloudpickle itself is imported when something is pickled.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import io
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

_TRACKER = "_DYNAMIC_CLASS_TRACKER_BY_CLASS"
"""Where cloudpickle keeps the classes it has pickled or made, to give them one identity in all processes."""


class Writable(Protocol):
    """Where a pickle goes."""

    def write(self, data: Any, /) -> object:  # noqa: ANN401 - bytes or a buffer, as the pickler likes
        """Take the next bytes."""


class Readable(Protocol):
    """Where a pickle comes from."""

    def read(self, num_bytes: int, /) -> bytes:
        """Return the next bytes."""
        ...

    def readline(self) -> bytes:
        """Return the next line."""
        ...


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception on its way from a rank to the caller."""

    pickled: bytes | None
    """The exception; ``None`` where it cannot be pickled, or would not come back the same."""
    type: str
    message: str
    traceback: str
    """From the user's first frame on, with the source lines."""


def dump(thing: object, file: Writable) -> None:
    """Write ``thing`` to ``file``; functions and classes of ``__main__`` go by value, of modules by name."""
    importlib.import_module("cloudpickle").dump(thing, file)


def load(file: Readable) -> Any:  # noqa: ANN401 - whatever was dumped
    """Read one thing back. A class that this process has already is that class, unchanged."""
    return _Unpickler(file).load()


def raised(error: BaseException, traceback: str) -> Raised:
    """Return ``error`` in the form that travels."""
    return Raised(_pickled(error), type(error).__name__, _text(error), traceback)


def unpicklable_part(fn: object, args: Sequence[object], kwargs: Mapping[str, object]) -> tuple[str, str]:
    """Return which part of a call cannot be pickled, in words, and what was said about it.

    Looks one step into the function: its own variables are what it most often fails for.
    """
    parts: list[tuple[str, object]] = [(f"argument {number + 1}", value) for number, value in enumerate(args)]
    parts += [(f"argument {name!r}", value) for name, value in kwargs.items()]
    parts += [(f"the variable {name!r}, which the function uses,", value) for name, value in _variables_of(fn)]
    for name, value in parts:
        problem = _refusal(value)
        if problem is not None:
            return f"{name} (a {type(value).__name__})", problem
    return "the function", _refusal(fn) or "unknown"


def classes_of_main() -> list[type]:
    """Return the classes of ``__main__`` that came by value, in arguments too."""
    tracked: Mapping[type, object] = getattr(importlib.import_module("cloudpickle.cloudpickle"), _TRACKER, {})
    return [kind for kind in list(tracked) if kind.__module__ == "__main__" and "." not in kind.__qualname__]


def plain_function(fn: Any) -> Any:  # noqa: ANN401 - a function, or whatever else is called
    """Return the function within partials, bound methods and decorators."""
    while True:
        if isinstance(fn, functools.partial):
            fn = fn.func
        elif inspect.ismethod(fn):
            fn = fn.__func__
        elif hasattr(fn, "__wrapped__"):
            fn = fn.__wrapped__
        else:
            return fn


def _variables_of(fn: object) -> Iterator[tuple[str, object]]:
    plain = plain_function(fn)
    if inspect.isfunction(plain):
        used = inspect.getclosurevars(plain)
        yield from used.nonlocals.items()
        yield from used.globals.items()


def _refusal(thing: object) -> str | None:
    """Return why ``thing`` cannot be pickled, or ``None`` where it can."""
    try:
        dump(thing, io.BytesIO())
    except Exception as problem:  # noqa: BLE001 - a pickler may run any code of the user's
        return f"{type(problem).__name__}: {problem}"
    return None


def _pickled(error: BaseException) -> bytes | None:
    # An __init__ of other arguments than it hands on fails when unpickled, or words its message twice.
    for form in (error, _Rebuilt(type(error), error.args, dict(vars(error)))):
        try:
            file = io.BytesIO()
            dump(form, file)
            same = exception(file.getvalue())
            if same is not None and type(same) is type(error) and _text(same) == _text(error):
                return file.getvalue()
        except Exception:  # noqa: BLE001, S112 - whatever it is, the text will do
            continue
    return None


@dataclass(frozen=True, slots=True)
class _Rebuilt:
    """An exception in parts, put together again without its ``__init__``."""

    kind: type[BaseException]
    args: tuple[object, ...]
    fields: dict[str, object]


def exception(pickled: bytes) -> BaseException | None:
    """Return the exception of a :class:`Raised`, or ``None`` where this process cannot make it."""
    try:
        form: BaseException | _Rebuilt = load(io.BytesIO(pickled))
    except Exception:  # noqa: BLE001 - unpickling runs any code of the user's
        return None
    if not isinstance(form, _Rebuilt):
        return form
    error = form.kind.__new__(form.kind, *form.args)
    error.args = form.args
    error.__dict__.update(form.fields)
    return error


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as problem:  # noqa: BLE001 - __str__ is the user's code
        return f"<its __str__ raised {type(problem).__name__}>"


class _Unpickler(pickle.Unpickler):
    """Leaves alone the classes there are: cloudpickle fills in even those with what the other process made of them."""

    def __init__(self, file: Readable) -> None:
        super().__init__(file)
        tracked = getattr(importlib.import_module("cloudpickle.cloudpickle"), _TRACKER, {})
        self._here_already: set[type] = set(tracked)

    def find_class(self, module: str, name: str, /) -> Any:  # noqa: ANN401
        found = super().find_class(module, name)
        if (module, name) == ("cloudpickle.cloudpickle", "_class_setstate"):
            return functools.partial(self._fill_in, found)
        return found

    def _fill_in(self, fill_in: Callable[[type, object], object], kind: type, state: object) -> object:
        return kind if kind in self._here_already else fill_in(kind, state)
