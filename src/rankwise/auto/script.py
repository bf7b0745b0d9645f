# SPDX-License-Identifier: Apache-2.0
"""A script for one device on several ranks, ``rankwise run --auto``: rank zero runs it, and the other ranks serve."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rankwise.launch.fork_server.entrypoint import Module, Script, run_as_main

if TYPE_CHECKING:
    from rankwise.auto.module_calls import ModuleCalls
    from rankwise.auto.rows import OwnCalls
    from rankwise.comm.backends.protocol import Exchange
    from rankwise.comm.session import Session
    from rankwise.launch.fork_server.entrypoint import Target


@dataclass(frozen=True, slots=True)
class AutoScript:
    """A script or a module that knows no ranks, or what runs one."""

    target: Target
    splits_always: bool = False
    """Whether to split calls also where that saves no time."""

    def __str__(self) -> str:
        """Return the command line."""
        return str(self.target)

    @property
    def names(self) -> frozenset[str]:
        """What the script uses, and what :meth:`run` imports."""
        own = ("module_calls", "rows", "calls", "connection", "servers", "row_server")
        return self.target.names.union(f"rankwise.auto.{module}" for module in own) | {"rankwise.comm.join"}

    def run(self) -> None:
        """Run it on rank zero, and serve on the other ranks. Called by: every rank."""
        # In the rank only: the command line imports no torch.
        from rankwise.auto.module_calls import ModuleCalls  # noqa: PLC0415
        from rankwise.auto.rows import OwnCalls  # noqa: PLC0415
        from rankwise.comm.join import join  # noqa: PLC0415
        from rankwise.comm.session import current  # noqa: PLC0415

        # An option that torch's old launcher passed: the script is to see one process.
        target = self.target
        if isinstance(target, Script | Module):
            target = replace(target, local_rank_option=None)
        with join() as world:
            session = current()
            if session.exchange is None:
                run_as_main(target)
                return
            calls = ModuleCalls(session.exchange)
            own = OwnCalls(session, session.exchange, calls)
            if world.rank == 0:
                _control(replace(self, target=target), session, session.exchange, calls, own)
            else:
                _serve(session, session.exchange, calls, own)


def _control(script: AutoScript, session: Session, exchange: Exchange, calls: ModuleCalls, own: OwnCalls) -> None:
    """Run the script. Called by: rank zero."""
    import signal  # noqa: PLC0415

    import torch  # noqa: PLC0415

    from rankwise.auto.calls import SplitCalls  # noqa: PLC0415
    from rankwise.auto.connection import accept_servers  # noqa: PLC0415
    from rankwise.auto.replacing import (  # noqa: PLC0415
        HeldSignals,
        group_hidden,
        one_by_one,
    )
    from rankwise.auto.servers import Servers  # noqa: PLC0415
    from rankwise.log import past_the_script  # noqa: PLC0415
    from rankwise.world.environments.process import of_one_process, splits_always  # noqa: PLC0415

    assert session.store is not None and session.detector is not None  # noqa: S101, PT018
    session.on_close()
    if session.world.source == "rankwise":
        # Its launcher passes them on. They do what they do in plain Python.
        for number in (signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, signal.SIG_DFL)
    with Servers(accept_servers(session, session.store, session.detector), exchange, own) as servers:
        split = SplitCalls(
            servers,
            calls,
            HeldSignals(),
            torch.device(session.world.device),
            splits_always=script.splits_always or splits_always(),
        )
        with past_the_script(), group_hidden(), one_by_one(), of_one_process(), split.replacing():
            run_as_main(script.target)


def _serve(session: Session, exchange: Exchange, calls: ModuleCalls, own: OwnCalls) -> None:
    """Serve until the script has ended. Called by: every rank but zero."""
    import os  # noqa: PLC0415

    import torch  # noqa: PLC0415

    from rankwise.auto.connection import connect  # noqa: PLC0415
    from rankwise.auto.row_server import RowServer  # noqa: PLC0415

    assert session.store is not None and session.detector is not None  # noqa: S101, PT018
    connection = connect(session, session.store, session.detector)
    with calls.replacing(calls.plain):
        has_ended_well = RowServer(connection, exchange, own, torch.device(session.world.device)).serve()
    if not has_ended_well:
        # Rank zero says what has happened.
        session.detector.leave(wait_for_peers=False)
        os._exit(0)
