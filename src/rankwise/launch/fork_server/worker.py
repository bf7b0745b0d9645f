# SPDX-License-Identifier: Apache-2.0
"""What a rank's process does from fork to exit: set up, run the target, record a failure.

Opens no process group: that is the script's call to ``rankwise.join()``. Imported by the launcher's
start, before the fork server is forked.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from functools import partial
from typing import TYPE_CHECKING

from rankwise import meter
from rankwise.comm import session
from rankwise.health.preemption import STOPPED_EXIT_CODE
from rankwise.launch.fork_server.entrypoint import run_as_main
from rankwise.launch.fork_server.rank_setup import set_up
from rankwise.launch.rank_files import alone_note, note_script_end
from rankwise.launch.report import failure, same_file, unjoined
from rankwise.world.environments.process import REPORT_OFF

if TYPE_CHECKING:
    from types import TracebackType

    from rankwise.launch.fork_server.entrypoint import Target
    from rankwise.launch.fork_server.fork_server import RankStart

INTERRUPTED = 130
"""Exit code after Ctrl-C, as a shell reports it."""


def run_rank(start: RankStart, target: Target, notify_pipe: int) -> int:
    """Run the target as one rank and return its exit code.

    Args:
        start: which rank this is, and its variables.
        target: what to run.
        notify_pipe: descriptor to write to when a failure has been recorded: the process may take
            a while to exit, or hang in doing so, and the others should be notified now.
    """
    set_up(start.variables)
    # The launcher shows the first failure, last and in full; ranks do not show theirs.
    sys.excepthook = _show_nothing
    own_pid = os.getpid()
    _watch_for_mistakes(start)
    sys.argv[0] = str(target)  # for what is recorded before the target has set its own
    if start.variables.get("RANKWISE_REPORT", REPORT_OFF) != REPORT_OFF:
        meter.listener().start_unjoined()
    close_groups = partial(_close_groups_left_open, own_pid)
    atexit.register(close_groups)  # before the script's own, which are called first
    try:
        try:
            run_as_main(target)
        finally:
            if start.rank == 0 and os.getpid() == own_pid:
                unjoined.forget_if_joined(alone_note(start.variables["RANKWISE_ERROR_FILE"]))
    except BaseException as error:  # noqa: BLE001 - every way a script can end passes here
        failure.trim(error)
        session.annotate(error)
        exit_code = _exit_code(error)
        if exit_code != 0:
            atexit.unregister(close_groups)  # It might wait for ranks that do not come.
        if os.getpid() != own_pid:
            # A process that the script forked and that returned from the script: not the rank.
            sys.__excepthook__(type(error), error, error.__traceback__)
            return exit_code
        if exit_code == 0:
            note_script_end(start.variables["RANKWISE_ERROR_FILE"])
        if exit_code not in {0, STOPPED_EXIT_CODE} and not _record_failure(error, start, exit_code, notify_pipe):
            sys.__excepthook__(type(error), error, error.__traceback__)
        if not isinstance(error, SystemExit):
            sys.excepthook(type(error), error, error.__traceback__)
        return exit_code
    if os.getpid() == own_pid:
        note_script_end(start.variables["RANKWISE_ERROR_FILE"])
    return 0


def _close_groups_left_open(own_pid: int) -> None:
    """Close the process groups that the script has opened and not destroyed.

    Otherwise threads of Gloo may still hold tensors when the interpreter ends, and abort the process.
    """
    if os.getpid() != own_pid or "torch.distributed" not in sys.modules:
        return
    # A script without torch does not pay for it.
    import torch.distributed as dist  # noqa: PLC0415

    from rankwise.torch_private.groups import have_groups_leaked, open_groups  # noqa: PLC0415

    if open_groups() and not have_groups_leaked():
        dist.destroy_process_group()


def _watch_for_mistakes(start: RankStart) -> None:
    """Report silent mistakes with several ranks where they happen."""
    error_file = start.variables["RANKWISE_ERROR_FILE"]
    if int(start.variables["WORLD_SIZE"]) == 1:
        return
    same_file.watch(start.rank, error_file)
    if "RANKWISE_GUARD" in start.variables:
        from rankwise.launch import replica_guard  # noqa: PLC0415 - imports what only guarded ranks need

        replica_guard.watch(int(start.variables["WORLD_SIZE"]))
    if start.rank == 0:
        unjoined.watch(int(start.variables["WORLD_SIZE"]), alone_note(error_file))


def _exit_code(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if not isinstance(error, SystemExit):
        return 1
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    print(error.code, file=sys.stderr)  # noqa: T201 - as Python does
    return 1


def _record_failure(error: BaseException, start: RankStart, exit_code: int, notify_pipe: int) -> bool:
    """Record how this rank failed, for the launcher; return whether that was possible."""
    # Nothing may keep the rank from exiting: neither a full disk nor an exception of the script's own class.
    with contextlib.suppress(Exception):
        written = failure.from_exception(error, start.rank, exit_code)
        failure.write(written, start.variables["RANKWISE_ERROR_FILE"])
        os.write(notify_pipe, b"!")
        return True
    return False


def _show_nothing(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Replace ``sys.excepthook`` where the launcher shows the error."""
