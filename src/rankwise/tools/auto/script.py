# SPDX-License-Identifier: Apache-2.0
"""A script for one device that every rank runs whole, with its calls of modules split: ``rankwise run --auto``."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rankwise.launch.fork_server.entrypoint import run_as_main

if TYPE_CHECKING:
    from collections.abc import Generator

    from rankwise.comm.backends.protocol import Exchange
    from rankwise.launch.fork_server.entrypoint import Module, Script


@dataclass(frozen=True, slots=True)
class AutoScript:
    """A script or a module that knows no ranks."""

    target: Script | Module

    def __str__(self) -> str:
        """Return the command line."""
        return str(self.target)

    def run(self) -> None:
        """Run it as one of the ranks. Called by: every rank."""
        # In the rank only: the command line imports no torch.
        import torch  # noqa: PLC0415

        from rankwise.comm.join import join  # noqa: PLC0415
        from rankwise.comm.session import current  # noqa: PLC0415
        from rankwise.tools.auto.calls import SplitCalls  # noqa: PLC0415
        from rankwise.tools.auto.generators import start_alike  # noqa: PLC0415
        from rankwise.tools.auto.rank_zero import RankZeroFiles, output_of_rank_zero  # noqa: PLC0415

        with join() as world:
            session = current()
            exchange = session.exchange
            if exchange is None:
                run_as_main(self.target)
                return
            start_alike(torch.device(world.device))
            calls, files = SplitCalls(session, exchange), RankZeroFiles(exchange)
            with output_of_rank_zero(world.rank), calls.replacing(), files.replacing(), _refusing(exchange):
                run_as_main(self.target)
                calls.check_parameters()


@contextmanager
def _refusing(exchange: Exchange) -> Generator[None]:
    """Raise if the script starts processes, or joins ranks itself."""
    import torch.distributed as dist  # noqa: PLC0415 - in the rank only

    from rankwise.errors import ConfigurationError  # noqa: PLC0415
    from rankwise.health.call_site import responsible_module, user_call_site, words  # noqa: PLC0415

    own_process, is_active = os.getpid(), [True]
    plain = dist.init_process_group

    def joins(*_: Any, **__: Any) -> None:  # noqa: ANN401 - as torch
        raise ConfigurationError(
            "The script opens a process group of its own, but --auto runs scripts for one device.",
            where=words(user_call_site()),
            do="run it without --auto",
        )

    def look(event: str, _: tuple[object, ...]) -> None:
        if event not in {"os.fork", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn"} or not is_active:
            return
        if os.getpid() == own_process and responsible_module() == "__main__":
            raise ConfigurationError(
                "The script starts a program, which --auto would start once per rank.",
                where=words(user_call_site()),
                evidence=f"{exchange.world_size} ranks run the whole script",
                do="start it outside the script, or run without --auto",
            )

    dist.init_process_group = joins
    sys.addaudithook(look)
    try:
        yield
    finally:
        is_active.clear()
        dist.init_process_group = plain
