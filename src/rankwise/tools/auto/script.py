# SPDX-License-Identifier: Apache-2.0
"""A script for one device that every rank runs whole, with its calls of modules split: ``rankwise run --auto``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rankwise.launch.fork_server.entrypoint import Module, Script, run_as_main

if TYPE_CHECKING:
    from rankwise.launch.fork_server.entrypoint import Target


@dataclass(frozen=True, slots=True)
class AutoScript:
    """A script or a module that knows no ranks, or what runs one."""

    target: Target

    def __str__(self) -> str:
        """Return the command line."""
        return str(self.target)

    def run(self) -> None:
        """Run it as one of the ranks. Called by: every rank."""
        # In the rank only: the command line imports no torch.
        import torch  # noqa: PLC0415

        from rankwise.comm.join import join  # noqa: PLC0415
        from rankwise.comm.session import current  # noqa: PLC0415
        from rankwise.tools.auto.at_exit import exit_functions_called  # noqa: PLC0415
        from rankwise.tools.auto.calls import SplitCalls  # noqa: PLC0415
        from rankwise.tools.auto.generators import start_alike  # noqa: PLC0415
        from rankwise.tools.auto.libraries import libraries_replaced  # noqa: PLC0415
        from rankwise.tools.auto.rank_zero import RankZeroFiles, output_of_rank_zero  # noqa: PLC0415
        from rankwise.tools.auto.refusing import refusing  # noqa: PLC0415
        from rankwise.tools.auto.shared_calls import SharedCalls  # noqa: PLC0415
        from rankwise.tools.batched_backward import one_by_one  # noqa: PLC0415
        from rankwise.world.environments.process import of_one_process  # noqa: PLC0415

        # An option that torch's old launcher passed: the script is to see one process.
        target = self.target
        if isinstance(target, Script | Module):
            target = replace(target, local_rank_option=None)
        with join() as world:
            session = current()
            exchange = session.exchange
            if exchange is None:
                run_as_main(target)
                return
            start_alike(torch.device(world.device))
            shared = SharedCalls(exchange)
            calls = SplitCalls(session, exchange, shared.num_changes)
            files = RankZeroFiles(shared)
            with output_of_rank_zero(world.rank), calls.replacing(), files.replacing(), libraries_replaced(shared):
                with refusing(exchange.world_size), one_by_one(), of_one_process(), exit_functions_called():
                    run_as_main(target)
                calls.check_parameters()
