# SPDX-License-Identifier: Apache-2.0
"""What a script records to be looked at: TensorBoard's events and runs of Weights & Biases, by rank zero alone."""

from __future__ import annotations

import os
import socket
from datetime import datetime
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankwise.comm.collectives.objects import broadcast_object
from rankwise.tools.replacing import replace_attributes

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from rankwise.tools.after_import import Change
    from rankwise.tools.auto.shared_calls import SharedCalls
    from rankwise.tools.replacing import Replaced

_FOLDER = ("logdir", "log_dir")
_NAMES = ("dir", "id", "name")
"""Of a run of wandb, which scripts make paths of."""


def folder_of_rank_zero() -> Change:
    """Return a change of a module with a ``SummaryWriter``: the folder's name, with a time in it, is rank zero's."""

    def make(start: Callable[..., None]) -> Callable[..., None]:
        @wraps(start)
        def init(writer: Any, *args: Any, **kwargs: Any) -> None:
            named = [kwargs.pop(name) for name in _FOLDER if name in kwargs]
            folder = next(filter(None, (*args[:1], *named)), None)
            if not folder:
                comment = args[1] if args[1:] else kwargs.get("comment", "")
                folder = f"runs/{datetime.now().astimezone():%b%d_%H-%M-%S}_{socket.gethostname()}{comment}"
            agreed = broadcast_object(os.fspath(folder))
            start(writer, Path(agreed) if isinstance(folder, Path) else agreed, *args[1:], **kwargs)

        return init

    return lambda module: replace_attributes(module.SummaryWriter, ["__init__"], make)


def events_of_rank_zero(shared: SharedCalls) -> Change:
    """Return a change of a module with an ``EventFileWriter``: on ranks other than zero it writes nothing."""

    def make(real: Callable[..., Any]) -> Callable[..., Any]:
        return partial(_EventsOfRankZero, shared, real)

    return lambda module: replace_attributes(module, ["EventFileWriter"], make)


class _EventsOfRankZero:
    """An ``EventFileWriter`` on rank zero, and nothing on other ranks. Created by: every rank."""

    def __init__(
        self,
        shared: SharedCalls,
        real: Callable[..., Any],
        logdir: str,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        self._shared = shared
        self._logdir = logdir
        self._events = self._shared.by_rank_zero(lambda: real(logdir, *args, **kwargs), keeps=True)

    def get_logdir(self) -> str:
        """Return the folder."""
        return self._logdir

    def add_event(self, event: Any) -> None:
        """Write an event, sooner or later."""
        self._shared.note_change()
        self._on_rank_zero("add_event", event)

    def flush(self) -> None:
        """Write all events now. Called by: every rank."""
        self._on_rank_zero("flush")
        self._meet()

    def close(self) -> None:
        """Write all events and close the file. Called by: every rank."""
        self._on_rank_zero("close")
        self._meet()

    def reopen(self) -> None:
        """Open another file."""
        self._on_rank_zero("reopen")

    def _on_rank_zero(self, name: str, *args: Any) -> None:
        if self._events is not None:
            with self._shared.alone():
                getattr(self._events, name)(*args)

    def _meet(self) -> None:
        # The script may read the file next. Torch's SummaryWriter calls this, so the calling module says nothing.
        if self._shared.can_meet():
            self._shared.meet("writing events")


def wandb_of_rank_zero(shared: SharedCalls) -> Change:
    """Return a change of ``wandb``: the others have a disabled run with rank zero's configuration and names."""
    facts: dict[str, Any] = {}

    def make(start: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(start)
        def init(*args: Any, **kwargs: Any) -> Any:
            run = shared.by_rank_zero(lambda: start(*args, **kwargs), keeps=True)
            if run is None:
                with shared.alone():
                    run = start(*args, **{**kwargs, "mode": "disabled"})
            # A sweep gives rank zero values that the script has not.
            config, of_zero = broadcast_object((dict(run.config), {name: getattr(run, name) for name in _NAMES}))
            if not shared.is_rank_zero:
                run.config.update(config, allow_val_change=True)
                facts.update(of_zero)
            return run

        return init

    def named(name: str, own: property) -> property:
        return property(lambda run: facts.get(name, own.fget(run)), own.fset, doc=own.__doc__)  # type: ignore[misc]

    def change(module: ModuleType) -> Replaced:
        run = module.sdk.wandb_run.Run
        return [
            *replace_attributes(module, ["init"], make),
            *(one for name in _NAMES for one in replace_attributes(run, [name], partial(named, name))),
            *replace_attributes(run, ["log"], shared.counted),
        ]

    return change
