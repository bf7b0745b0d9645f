# SPDX-License-Identifier: Apache-2.0
"""Pickling of what is sent between a caller and its ranks: functions, values and exceptions, by value.

Nothing received over a network is unpickled here. Imported by the launch of a function, at both ends;
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

from rankwise.launch.report.failure import text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from _typeshed import SupportsNoArgReadline, SupportsRead, SupportsWrite

    class Readable(SupportsRead[bytes], SupportsNoArgReadline[bytes], Protocol):
        """A file that a pickle is read from."""


_TRACKER = "_DYNAMIC_CLASS_TRACKER_BY_CLASS"
"""Where cloudpickle keeps the classes it has pickled or created, so that each has one identity in all processes."""


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception as it is sent from a rank to the caller."""

    pickled: bytes | None
    """The exception; ``None`` if it cannot be pickled, or would change when unpickled."""
    type: str
    message: str
    traceback: str
    """From the user's first frame on, with the source lines."""


def dump(thing: object, file: SupportsWrite[bytes]) -> None:
    """Write ``thing`` to ``file``; functions and classes of ``__main__`` by value, those of modules by name."""
    importlib.import_module("cloudpickle").dump(thing, file)


def load(file: Readable) -> Any:
    """Read one object back. A class that this process already has is used, unchanged."""
    return _Unpickler(file).load()


def raised(error: BaseException, traceback: str) -> Raised:
    """Return ``error`` in the form that is sent."""
    return Raised(_pickled(error), type(error).__name__, text_of(error), traceback)


def unpicklable_part(fn: object, args: Sequence[object], kwargs: Mapping[str, object]) -> tuple[str, str]:
    """Return a description of the part of a call that cannot be pickled, and pickle's error.

    Looks one step into the function: its own variables are the most frequent cause.
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
    """Return the classes of ``__main__`` that were sent by value, including those in arguments."""
    tracked: Mapping[type, object] = getattr(importlib.import_module("cloudpickle.cloudpickle"), _TRACKER, {})
    return [kind for kind in list(tracked) if kind.__module__ == "__main__" and "." not in kind.__qualname__]


def plain_function(fn: Any) -> Any:
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
    """Return why ``thing`` cannot be pickled, or ``None`` if it can."""
    try:
        dump(thing, io.BytesIO())
    except Exception as problem:  # noqa: BLE001 - a pickler may run any code of the user's
        return f"{type(problem).__name__}: {problem}"
    return None


def _pickled(error: BaseException) -> bytes | None:
    # An __init__ that passes other arguments to super() fails when unpickled, or formats its message twice.
    for form in (error, _Rebuilt(type(error), error.args, dict(vars(error)))):
        try:
            file = io.BytesIO()
            dump(form, file)
            same = exception(file.getvalue())
            if same is not None and type(same) is type(error) and text_of(same) == text_of(error):
                return file.getvalue()
        except Exception:  # noqa: BLE001, S112 - whatever it is, the text will do
            continue
    return None


@dataclass(frozen=True, slots=True)
class _Rebuilt:
    """An exception in parts, rebuilt without calling its ``__init__``."""

    kind: type[BaseException]
    args: tuple[object, ...]
    fields: dict[str, object]


def exception(pickled: bytes) -> BaseException | None:
    """Return the exception of a :class:`Raised`, or ``None`` if this process cannot rebuild it."""
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


class _Unpickler(pickle.Unpickler):
    """Keeps existing classes unchanged: cloudpickle would overwrite them with the other process's state."""

    def __init__(self, file: Readable) -> None:
        super().__init__(file)
        tracked = getattr(importlib.import_module("cloudpickle.cloudpickle"), _TRACKER, {})
        self._here_already: set[type] = set(tracked)

    def find_class(self, module: str, name: str, /) -> Any:
        found = super().find_class(module, name)
        if (module, name) == ("cloudpickle.cloudpickle", "_class_setstate"):
            return functools.partial(self._fill_in, found)
        return found

    def _fill_in(self, fill_in: Callable[[type, object], object], kind: type, state: object) -> object:
        return kind if kind in self._here_already else fill_in(kind, state)
