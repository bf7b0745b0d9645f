# SPDX-License-Identifier: Apache-2.0
"""What a script for one device must not do or see on several ranks: start programs, join ranks, find a group open."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from functools import partial
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rankwise.errors import ConfigurationError
from rankwise.health.call_site import user_call_site, words
from rankwise.tools.auto.caller import calling_module
from rankwise.tools.replacing import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

_STARTS = {"os.exec", "os.fork", "os.posix_spawn", "os.system", "subprocess.Popen"}
"""Audit events of Python."""


@contextmanager
def refusing(world_size: int) -> Generator[None]:
    """Raise inside the block where the script starts a program or opens a process group."""
    process = os.getpid()
    is_over = False

    def look(event: str, args: tuple[object, ...]) -> None:
        # An audit hook stays until the process ends.
        if is_over or os.getpid() != process:
            return
        if event in _STARTS and calling_module() == "__main__":
            raise _starts_program(world_size)
        if event == "sqlite3.connect" and args[0] != ":memory:":
            raise _writes("opens a database with sqlite3")
        if event == "open" and _writes_file(*args) and calling_module() == "__main__":
            raise _writes("writes to a file with os.open")

    def checked(start: Callable[[BaseProcess], None]) -> Callable[[BaseProcess], None]:
        def check(started: BaseProcess) -> None:
            # Workers of a loader are started by torch.utils.data.
            if calling_module().startswith(("__main__", "torch.multiprocessing")):
                raise _starts_program(world_size)
            start(started)

        return check

    sys.addaudithook(look)
    try:
        with replaced(
            (dist, ["init_process_group"], lambda _: _opens_group),
            (dist, ["is_initialized"], partial(_for_script, lambda: False)),
            (dist, ["get_rank", "get_world_size"], partial(_for_script, _has_no_group)),
            (BaseProcess, ["start"], checked),
            (torch, ["from_file"], _of_memory),
        ):
            yield
    finally:
        is_over = True


def _for_script(answer: Callable[[], Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that answers the script and its libraries; torch and rankwise get torch's own answer."""

    def call(*args: Any, **kwargs: Any) -> Any:
        is_own = calling_module().partition(".")[0] in {"torch", "rankwise"}
        return function(*args, **kwargs) if is_own else answer()

    return call


def _has_no_group() -> None:
    raise ValueError("Default process group has not been initialized, please make sure to call init_process_group.")


def _starts_program(world_size: int) -> ConfigurationError:
    return ConfigurationError(
        "The script starts a program, which --auto would start once per rank.",
        where=words(user_call_site()),
        evidence=f"{world_size} ranks run the whole script",
        do="start it outside the script, or run without --auto",
    )


def _writes_file(path: object, mode: object, flags: object) -> bool:
    """Return whether the arguments of the audit event are those of an ``os.open`` that appends or overwrites."""
    is_file = isinstance(path, str) and not path.startswith("/dev/")
    return is_file and mode is None and isinstance(flags, int) and bool(flags & (os.O_APPEND | os.O_TRUNC))


def _of_memory(from_file: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``torch.from_file``, which raises for a file that the tensor would change."""

    def call(filename: str, shared: bool | None = None, *args: Any, **kwargs: Any) -> Any:  # noqa: FBT001 - as torch's
        if shared and calling_module() == "__main__":
            raise _writes("maps a file with torch.from_file(shared=True)")
        return from_file(filename, shared, *args, **kwargs)

    return call


def _writes(what: str) -> ConfigurationError:
    return ConfigurationError(
        f"The script {what}, which every rank would write.",
        where=words(user_call_site()),
        do="write to a file with open(), or run without --auto",
    )


def _opens_group(*_: Any, **__: Any) -> None:
    raise ConfigurationError(
        "The script opens a process group of its own, but --auto runs scripts for one device.",
        where=words(user_call_site()),
        do="run it without --auto",
    )
