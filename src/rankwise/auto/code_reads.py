# SPDX-License-Identifier: Apache-2.0
"""What Python code reads: the names in it, and which functions run in a call. Nothing is executed to find the names."""

from __future__ import annotations

import dis
import gc
import sys
from contextlib import contextmanager
from functools import lru_cache
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable
    from types import FrameType

    Ran = dict[int, tuple[CodeType, dict[str, Any]]]
    """Code that has run, by its ``id``, and its globals."""

_INSTALLED = ("site-packages", "dist-packages")
_PLATFORM = sys.stdlib_module_names | {"torch", "rankwise"}


@contextmanager
def noted_functions() -> Generator[Ran]:
    """Note the code that runs on this thread inside the block, except torch's, rankwise's and the standard library's.

    A profiler of the script sees nothing of the block. One that can be neither replaced nor restored is left alone.
    """
    ran: Ran = {}
    seen: dict[int, CodeType] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and id(code) not in seen:
            seen[id(code)] = code
            home = frame.f_globals.get("__name__")  # what torch.compile generates has none
            if home is not None and str(home).partition(".")[0] not in _PLATFORM:
                ran[id(code)] = code, frame.f_globals

    previous: Any = sys.getprofile()
    enable = getattr(previous, "enable", None)  # of cProfile, which is no function
    if previous is not None and enable is None and not callable(previous):
        yield ran
        return
    sys.setprofile(note)
    try:
        yield ran
    finally:
        sys.setprofile(None)
        if enable is not None:
            enable()
        elif previous is not None:
            sys.setprofile(previous)


class Names(NamedTuple):
    """The names in code, and in the functions that are written in it."""

    globals: set[str]
    stored_globals: set[str]
    attributes: set[str]
    """Also the strings that could be one, for ``getattr``."""
    stored_attributes: set[str]
    chains: set[tuple[str, ...]]
    """A global, an attribute of it, an attribute of that ...: ``torch.nn.functional.relu``."""
    imported: set[str]


@lru_cache(4096)
def names_of(code: CodeType) -> Names:
    """Return the names in code."""
    found = Names(set(), set(), set(), set(), set(), set())
    chain: tuple[str, ...] = ()
    for one in dis.get_instructions(code):
        if one.opname not in {"CACHE", "PUSH_NULL", "EXTENDED_ARG"}:
            chain = _add(one, chain, found) if one.opcode in dis.hasname else ()
    found.attributes.update(one for one in code.co_consts if isinstance(one, str) and one.isidentifier())
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            for own, names in zip(found, names_of(inner), strict=True):
                own.update(names)  # type: ignore[arg-type]
    return found


def _add(one: dis.Instruction, before: tuple[str, ...], found: Names) -> tuple[str, ...]:
    """Add the name of an instruction, and return the chain that ends in it; ``before`` ends in the one before."""
    if one.opname == "IMPORT_NAME":
        found.imported.add(one.argval)
    elif one.opname.endswith(("_GLOBAL", "_GLOBALS", "_NAME")):
        found.globals.add(one.argval)
        found.stored_globals.update([one.argval] if one.opname == "STORE_GLOBAL" else [])
        return (one.argval,)
    else:
        found.attributes.add(one.argval)
        found.stored_attributes.update([one.argval] if one.opname == "STORE_ATTR" else [])
        found.chains.update([(*before, one.argval)] if before else [])
        return (*before, one.argval) if before else ()
    return ()


def functions_of(codes: Iterable[CodeType]) -> list[FunctionType]:
    """Return the functions that exist of some code. It asks the garbage collector, which takes long."""
    wanted = {id(one): one for one in codes}
    found = gc.get_referrers(*wanted.values()) if wanted else []
    return [one for one in found if isinstance(one, FunctionType) and id(one.__code__) in wanted]


def is_of_script(name: str) -> bool:
    """Return whether a module is the script or one that it brings along, not an installed library."""
    if name == "__main__":
        return True
    root = name.partition(".")[0]
    file = getattr(sys.modules.get(root), "__file__", None) or getattr(sys.modules.get(name), "__file__", None)
    is_library = root in sys.stdlib_module_names or root in {"torch", "rankwise"} or file is None
    return not is_library and not any(folder in str(file) for folder in _INSTALLED)
