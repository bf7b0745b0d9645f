# SPDX-License-Identifier: Apache-2.0
"""One run of the script: a process that launches its ranks, each of which records what the script does.

Imported by ``runs``, which forks that process.
"""

from __future__ import annotations

import os
import random
import sys
import traceback
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NoReturn

import torch

from rankwise.errors import RankwiseError
from rankwise.launch.fork_server.entrypoint import find_target, run_as_main
from rankwise.launch.options import LaunchOptions
from rankwise.launch.report.failure_report import TerminalReporter
from rankwise.launch.start import launch
from rankwise.tools.after_import import changed_after_import
from rankwise.tools.auto.script import AutoScript
from rankwise.tools.batched_backward import one_by_one
from rankwise.tools.verify.recorder import Plan, Recorder, StepsTaken
from rankwise.world.environments.process import make_cublas_deterministic, read_process

if TYPE_CHECKING:
    from rankwise.launch.fork_server.entrypoint import Module, Script


@dataclass(frozen=True, slots=True)
class RunOrder:
    """One run of the script: what runs, on how many ranks, and how it is recorded."""

    target: str
    is_module: bool
    arguments: tuple[str, ...]
    num_ranks: int
    device: Literal["auto", "cpu"]
    plan: Plan
    auto: bool = False
    """Whether rank zero runs it and the others serve, as with ``rankwise run --auto``."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A script that is recorded while it runs: what each rank runs."""

    target: Script | Module
    plan: Plan
    is_auto: bool = False
    """Whether it is the script's only process, whatever ranks there are."""

    def __str__(self) -> str:
        return str(self.target)

    def run(self) -> None:
        """Record the script as it runs."""
        place = None if self.is_auto else read_process()
        recorder = Recorder(self.plan, *((0, 1) if place is None else (place.rank, place.world_size)))
        recorder.install()
        how, failed = "script", None
        try:
            with one_by_one(), changed_after_import(recorder.of_strategies()):
                run_as_main(self.target)
        except StepsTaken:
            how = "steps"
        except SystemExit as error:
            how = "script" if error.code in {None, 0} else f"SystemExit: {error.code}"
            raise
        except BaseException as error:
            how, failed = "".join(traceback.format_exception_only(error)).rstrip(), error
            raise
        finally:
            recorder.finish(how, failed)


def launch_ranks(order: RunOrder) -> NoReturn:
    """Run the ranks, and end this process with their exit code; a rank leaves with SystemExit."""
    # As in a new process: forks of one process would otherwise all draw the same unseeded numbers.
    torch.default_generator.seed()
    random.seed()
    # Read by cuBLAS when a rank first uses it; without it, equal products may differ in their last bits.
    make_cublas_deterministic()
    target = find_target(order.target, order.arguments, is_module=order.is_module)
    options = LaunchOptions(num_ranks=order.num_ranks, device=order.device)
    is_auto = order.auto and order.num_ranks > 1
    # The recorder is installed last: it sees the calls that the script makes, not their parts. Under --auto the script
    # is given no local rank.
    recorded = Recorded(replace(target, local_rank_option=None) if is_auto else target, order.plan, is_auto)
    try:
        exit_code = launch(
            AutoScript(recorded, splits_always=True) if is_auto else recorded, options, TerminalReporter()
        )
    except RankwiseError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        exit_code = 2
    sys.stderr.flush()
    os._exit(exit_code)
