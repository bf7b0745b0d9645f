# SPDX-License-Identifier: Apache-2.0
"""Side effects of a call that can be seen while it runs: output, files, hooks on tensors.

A split call would do them with a part of the batch only.
"""

from __future__ import annotations

import logging
import sys
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from rankwise.auto.replacing import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

_WRITES = frozenset("wax+")
_watching: list[Effects] = []


class Effects:
    """What one call has done."""

    def __init__(self) -> None:
        self.found: str | None = None
        """In words that follow a colon."""

    @contextmanager
    def noted(self) -> Generator[None]:
        """Note what is done inside the block."""
        _listen()
        _watching.append(self)
        try:
            with replaced(
                (sys, ["stdout", "stderr"], lambda stream: _Noting(stream, self)),
                (logging.Logger, ["handle"], self._noting_logs),
                (torch.Tensor, ["register_hook", "register_post_accumulate_grad_hook", "retain_grad"], self._noting),
            ):
                yield
        finally:
            _watching.remove(self)

    def note(self, text: str) -> None:
        """Note an effect, if it is the first one."""
        self.found = self.found or text

    def _noting_logs(self, handle: Callable[..., Any]) -> Callable[..., Any]:
        def call(logger: logging.Logger, record: logging.LogRecord) -> Any:
            if not logger.name.startswith("torch."):  # the compiler's
                self.note("it logs")
            return handle(logger, record)

        return call

    def _noting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.note(f"it calls Tensor.{method.__name__}, which would see a part of the batch")
            return method(*args, **kwargs)

        return call


class _Noting:
    """A stream that notes that it is written to."""

    def __init__(self, stream: Any, effects: Effects) -> None:
        self._stream = stream
        self._effects = effects

    def write(self, text: str) -> int:
        if sys._getframe(1).f_globals.get("__name__") != "warnings":  # noqa: SLF001 - the documented name
            self._effects.note("it prints")
        return int(self._stream.write(text) or 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@cache
def _listen() -> None:
    """Follow which files are opened. An audit hook cannot be removed."""

    def opened(event: str, args: tuple[Any, ...]) -> None:
        if _watching and event == "open" and isinstance(args[1], str) and _WRITES & set(args[1]):
            _watching[-1].note("it writes files")

    sys.addaudithook(opened)
