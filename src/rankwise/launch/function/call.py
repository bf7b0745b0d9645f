# SPDX-License-Identifier: Apache-2.0
"""A call of ``rankwise.launch``: the file it is sent in, and what a rank does with it.

A rank answers the caller over an inherited socket pair, with a descriptor of an unnamed file for
large data: nothing is left on the disk, however a process exits. Functions, values and exceptions are pickled by value,
and nothing received over a network is unpickled. Imported by the launch of a function, at both ends.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import io
import json
import linecache
import mmap
import os
import pickle
import socket
import sys
import tempfile
import traceback
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import IO, TYPE_CHECKING, Any, Protocol

from rankwise.comm import session
from rankwise.errors import LaunchError, RankFailed, RankwiseError, rank_prefix
from rankwise.launch.fork_server.entrypoint import names_in
from rankwise.launch.messages import receive_packet, send_packet
from rankwise.launch.report.failure import text_of, trim

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from _typeshed import SupportsNoArgReadline, SupportsRead, SupportsWrite

    from rankwise.launch.messages import RemoteCommand
    from rankwise.launch.options import LaunchOptions

    class Readable(SupportsRead[bytes], SupportsNoArgReadline[bytes], Protocol):
        """A file that a pickle is read from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FunctionCall:
    """A function and its arguments."""

    fn: Callable[..., Any]
    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    is_decorated: bool
    """Whether ``fn`` was created by ``@launcher``: then the wrapped function is called."""

    def __call__(self) -> Any:
        """Call the function."""
        fn: Callable[..., Any] = vars(self.fn)["__wrapped__"] if self.is_decorated else self.fn
        return fn(*self.args, **self.kwargs)


@dataclass(frozen=True, kw_only=True, slots=True)
class CallerContext:
    """What a rank inherits from the caller, besides its variables and working directory."""

    name: str
    """Of the function, for people."""
    options: LaunchOptions
    names: frozenset[str]
    """Names that the function uses."""
    argv: list[str]
    path: list[str]
    sources: dict[str, list[str]]
    """Source lines of notebook cells, by their names in tracebacks."""
    command: RemoteCommand | None = None
    """A script or module to run, and no function."""


def caller_context(name: str, fn: object, options: LaunchOptions) -> CallerContext:
    """Return this process's part of a call of ``fn``."""
    typed = {
        filename: list(entry[2])
        for filename, entry in list(linecache.cache.items())
        if len(entry) == 4 and not Path(filename).exists()  # noqa: PLR2004 - an entry that has been read
    }
    # getattr: an embedded interpreter may have none.
    argv = [*getattr(sys, "argv", [])]
    names = names_used(fn)
    return CallerContext(name=name, options=options, names=names, argv=argv, path=[*sys.path], sources=typed)


def write(context: CallerContext, call: FunctionCall) -> IO[bytes]:
    """Return an unnamed file with both: the context for the launcher, the call for each rank."""
    file = tempfile.TemporaryFile(prefix="rankwise-")  # noqa: SIM115 - the caller's to close
    try:
        pickle.dump(context, file)
        dump(call, file)
        file.flush()
    except BaseException:
        file.close()
        raise
    return file


@dataclass(frozen=True, slots=True)
class CallerMessage:
    """A message to the caller."""

    header: dict[str, Any]
    body: int | None
    """Descriptor of a file, for the receiver to close."""

    def read(self) -> Any:
        """Unpickle the body."""
        if self.body is None:
            return None
        with mmap.mmap(self.body, 0, access=mmap.ACCESS_READ) as view:
            return load(view)

    def data(self) -> bytes | None:
        """Return the body as it was pickled; nothing is unpickled."""
        if self.body is None:
            return None
        with mmap.mmap(self.body, 0, access=mmap.ACCESS_READ) as view:
            return view[:]

    def close(self) -> None:
        """Close the body."""
        if self.body is not None:
            os.close(self.body)


def message_of(header: dict[str, Any], data: bytes | None) -> CallerMessage:
    """Return a message that has come another way, for the receiver to close."""
    if data is None:
        return CallerMessage(header, None)
    with tempfile.TemporaryFile(prefix="rankwise-") as file:
        file.write(data)
        file.flush()
        return CallerMessage(header, os.dup(file.fileno()))


def send(to: socket.socket, header: Mapping[str, object], body: IO[bytes] | None = None) -> None:
    """Send a complete message; several processes may do so over one socket."""
    if body is not None:
        body.flush()
    send_packet(to, json.dumps(header).encode(), [] if body is None else [body.fileno()])


def receive(source: socket.socket) -> CallerMessage | None:
    """Return the next message, or ``None`` if all processes at the other end have exited."""
    text, descriptors = receive_packet(source, 1)
    return CallerMessage(json.loads(text), descriptors[0] if descriptors else None) if text else None


class Function:
    """The target of a launched call: runs in a rank, and sends the caller the outcome."""

    def __init__(self, file: int, caller: socket.socket) -> None:
        """Read the launcher's part of the file that :func:`write` wrote; every rank reads the file itself."""
        self._file = file
        self._caller = caller
        with mmap.mmap(file, 0, access=mmap.ACCESS_READ) as view:
            self.context: CallerContext = pickle.load(view)  # noqa: S301 - the caller is this user's process
            self._offset = view.tell()

    def __str__(self) -> str:
        """Return the function's name."""
        return self.context.name

    @property
    def names(self) -> frozenset[str]:
        """Names that the function uses."""
        return self.context.names

    def run(self) -> None:
        """Call the function as this process's ``__main__`` would."""
        own_pid = os.getpid()
        header = _header()
        main = _become_main(self.context)
        try:
            call = self._load()
            _bind(call.fn, main)
            value = _called(call)
            if os.getpid() == own_pid:
                self._send_value(value, header)
        except BaseException as error:
            trim(error)
            # A process that the function forked and that returned from it is not the rank.
            if os.getpid() == own_pid:
                self._send_error(error, header)
            raise

    def _load(self) -> FunctionCall:
        with mmap.mmap(self._file, 0, access=mmap.ACCESS_READ) as view:
            os.close(self._file)
            view.seek(self._offset)
            return load(view)

    def _send_value(self, value: object, header: Mapping[str, object]) -> None:
        with tempfile.TemporaryFile(prefix="rankwise-") as file:
            try:
                dump(value, file)
            except OSError:
                raise
            except Exception as problem:  # noqa: BLE001 - pickling runs any code of the user's
                rank, world_size = int(str(header["rank"])), int(str(header["world_size"]))
                raise RankFailed(
                    f"The {type(value).__name__} that {self} returned on rank {rank} cannot be pickled.",
                    rank=rank,
                    where=rank_prefix(rank, world_size, socket.gethostname()),
                    evidence=f"{type(problem).__name__}: {problem}",
                    do="return values that can be pickled: numbers, text, tensors, lists and dicts of them",
                ) from None
            send(self._caller, {**header, "kind": "value"}, file)

    def _send_error(self, error: BaseException, header: Mapping[str, object]) -> None:
        session.annotate(error)
        text = "" if isinstance(error, SystemExit) else "".join(traceback.format_exception(error))
        # The caller may have exited, or the disk be full: the launcher still reports the failure as text.
        with contextlib.suppress(OSError), tempfile.TemporaryFile(prefix="rankwise-") as file:
            dump(raised(error, text), file)
            send(self._caller, {**header, "kind": "error"}, file)


def _called(call: FunctionCall) -> Any:
    try:
        return call()
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise
        # `sys.exit()` means success without a value.
        return None


def _header() -> dict[str, object]:
    """Return the sender. Read before the function runs, which may change any variable."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    facts: dict[str, object] = {name.lower(): int(os.environ[name]) for name in names}
    return {**facts, "hostname": socket.gethostname(), "attempt": int(os.environ["RANKWISE_ATTEMPT"])}


def _become_main(context: CallerContext) -> ModuleType:
    """Make an empty ``__main__`` without a file, so that the caller's script is not imported again."""
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    sys.modules["__main__"] = main
    sys.argv[:] = context.argv
    sys.path[:] = context.path
    for name, lines in context.sources.items():
        # Without a modification time linecache does not look for the file.
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    return main


def _bind(fn: object, main: ModuleType) -> None:
    """Copy what the function uses of the caller's ``__main__`` into the rank's.

    Plain pickle finds its classes there: for what a loader's workers send to their rank, for example.
    """
    for kind in classes_of_main():
        main.__dict__.setdefault(kind.__name__, kind)
    plain = plain_function(fn if isinstance(fn, FunctionType | partial | MethodType) else type(fn).__call__)
    variables: dict[str, object] = getattr(plain, "__globals__", {})
    if variables.get("__name__") == "__main__":
        main.__dict__.update({name: value for name, value in variables.items() if not name.startswith("__")})


# -- what is sent, pickled by value; cloudpickle is imported when something is -------------------------

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


def refusal(of_launcher: Raised) -> BaseException:
    """Return the error of a launcher that has started nothing."""
    error = exception(of_launcher.pickled)
    if isinstance(error, RankwiseError):
        return error
    return LaunchError(
        f"The launcher failed: {of_launcher.type}: {of_launcher.message}", evidence=of_launcher.traceback
    )


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


_FUNCTIONS = (FunctionType, type, staticmethod, classmethod, property, functools.partial)
"""What a class may hold that uses names; other attributes may answer to any name."""


def names_used(fn: object) -> frozenset[str]:
    """Return the names that a function uses, and the modules they are from.

    Follows functions and classes of the function's own module: they are not run.
    """
    found: set[str] = set()
    followed: list[object] = []
    left: list[object] = [fn]
    while left:
        one = plain_function(left.pop())
        if any(one is other for other in followed):
            continue
        followed.append(one)
        if isinstance(one, type):
            left += [value for value in vars(one).values() if isinstance(value, _FUNCTIONS)]
        elif isinstance(one, FunctionType):
            names = names_in(one.__code__)
            globals_used = [one.__globals__[name] for name in names & one.__globals__.keys()]
            found |= names
            parts = [value for value in globals_used if isinstance(value, FunctionType | type)]
            modules = [value.__name__ for value in globals_used if isinstance(value, ModuleType)]
            # Functions that were made by exec() have no module.
            found |= {name for name in [*modules, *(part.__module__ for part in parts)] if isinstance(name, str)}
            left += [value for value in parts if value.__module__ == one.__module__]
    return frozenset(found)


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


def exception(pickled: bytes | None) -> BaseException | None:
    """Return the exception of a :class:`Raised`, or ``None`` if this process cannot rebuild it."""
    if pickled is None:
        return None
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
