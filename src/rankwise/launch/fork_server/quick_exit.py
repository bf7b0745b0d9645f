# SPDX-License-Identifier: Apache-2.0
"""How a rank exits without taking apart what it shares with the fork server: torch, and what came before the script.

At exit Python clears every module, and C++ destroys the registries of every library. In a forked process both write to
memory that is shared until then, which the kernel copies page by page: 0.2 s of processor time per rank. What the
script has imported, opened and registered itself is taken apart as always.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING

from rankwise.world.device.kinds import LOADS_PROFILER

if TYPE_CHECKING:
    from types import ModuleType

_kept: dict[str, ModuleType] = {}
"""The modules of the fork server, once :func:`keep_modules` was called."""


def keep_modules() -> None:
    """Have this process, and those forked from it, not clear the modules that are imported now when they exit."""
    if not _kept:
        # Functions that are registered later run before it.
        atexit.register(_hide_modules)
    _kept.update(sys.modules)


def _hide_modules() -> None:
    # Functions that were registered before it run later, and may import these modules.
    sys.meta_path.insert(0, _KeptModules())
    for name in _kept.keys() - {"__main__", "builtins", "sys"}:
        if sys.modules.get(name) is _kept[name]:
            del sys.modules[name]


class _KeptModules(MetaPathFinder, Loader):
    """Finds hidden modules again: most libraries cannot be imported twice by one process."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        del path, target
        return ModuleSpec(fullname, self) if fullname in _kept else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _kept[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: it ran long ago. Called by Python."""


def leave_libraries_alone() -> None:
    """End this process, when it exits, once the C library has called what is registered after this call.

    Called by: a rank, before its script. Does nothing where a library was loaded by the environment, as profilers are:
    it may write its results at the end. Built on on_exit(3) of glibc, which passes the exit code.
    """
    if os.environ.get("LD_PRELOAD") or os.environ.get(LOADS_PROFILER):
        return
    libc = ctypes.CDLL(None)
    with contextlib.suppress(AttributeError):
        on_exit, end, close_streams = libc.on_exit, libc["_exit"], libc.fcloseall
        # In reverse order: buffers of C streams are written first.
        on_exit(end, None)
        on_exit(close_streams, None)
