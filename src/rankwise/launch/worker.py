# SPDX-License-Identifier: Apache-2.0
"""What a rank's process does from fork to end: settle in, run the target, tell of a failure.

Opens no process group: that is the script's call to ``rankwise.join()``. Imported by the launcher's
start, before the warm server is forked.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from rankwise import session, silent
from rankwise.launch import alone, ddp_end, failure, script_end, torch_env, written
from rankwise.launch.target import run_as_main, without_launcher_frames
from rankwise.launch.temporary import keep_sockets_in
from rankwise.stopping import STOPPED_EXIT_CODE

if TYPE_CHECKING:
    from types import TracebackType

    from rankwise.launch.server import RankStart
    from rankwise.launch.target import Target

INTERRUPTED = 130
"""Exit code after Ctrl-C, as a shell tells it."""
OTHER_LAUNCHERS = ("TORCHELASTIC_", "ROLE_")
"""Variables of a torchrun around this launcher, which would speak of its ranks and not of ours."""


def run_rank(start: RankStart, target: Target, doorbell: int) -> int:
    """Run the target as one rank and return its exit code.

    Args:
        start: which rank this is, and its variables.
        target: what to run.
        doorbell: descriptor to write to when a failure has been written down: the process may take
            a while to end, or hang in doing so, and the others should hear of it now.
    """
    _settle(start.variables)
    keep_sockets_in(str(Path(start.variables["RANKWISE_ERROR_FILE"]).parent))
    own_pid = os.getpid()
    _offer_stack(start.variables.get("RANKWISE_STACK_FILE", ""))
    _look_for_mistakes(start)
    try:
        run_as_main(target)
    except BaseException as error:  # noqa: BLE001 - every way a script can end passes here
        without_launcher_frames(error)
        session.annotate(error)
        exit_code = _exit_code(error)
        if os.getpid() != own_pid:
            # A process the script forked and let run out of its own code: not the rank.
            sys.__excepthook__(type(error), error, error.__traceback__)
            return exit_code
        if exit_code == 0:
            script_end.leave_note(start.variables["RANKWISE_ERROR_FILE"])
        if exit_code not in {0, STOPPED_EXIT_CODE} and not _leave_word(error, start, exit_code, doorbell):
            sys.__excepthook__(type(error), error, error.__traceback__)
        if not isinstance(error, SystemExit):
            sys.excepthook(type(error), error, error.__traceback__)
        return exit_code
    if os.getpid() == own_pid:
        script_end.leave_note(start.variables["RANKWISE_ERROR_FILE"])
    return 0


def _look_for_mistakes(start: RankStart) -> None:
    """Have what goes wrong in silence with several ranks reported where it happens."""
    error_file = start.variables["RANKWISE_ERROR_FILE"]
    if int(start.variables["WORLD_SIZE"]) == 1:
        return
    written.watch(start.rank, error_file)
    if "RANKWISE_GUARD" in start.variables:
        from rankwise.launch import guarded  # noqa: PLC0415 - imports what only guarded ranks need

        guarded.watch(int(start.variables["WORLD_SIZE"]))
    if start.rank == 0:
        alone.watch(int(start.variables["WORLD_SIZE"]), alone.note_of(error_file))


def threads_per_rank(local_world_size: int, chosen: str | None) -> int:
    """Return how many threads a rank computes with: its share of the cores, or the user's choice.

    Args:
        local_world_size: ranks on this machine.
        chosen: the user's ``OMP_NUM_THREADS``, which may list a number per level of nesting.
    """
    first = (chosen or "").split(",")[0].strip()
    if first.isdecimal() and int(first) > 0:
        return int(first)
    return max(1, len(os.sched_getaffinity(0)) // local_world_size)


def _settle(variables: dict[str, str]) -> None:
    for name in [name for name in os.environ if name.startswith(OTHER_LAUNCHERS)]:
        del os.environ[name]
    os.environ.update(variables)
    # As torchrun sets it; torch's own default aborts no communicator.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    torch_env.follow(variables)
    ddp_end.follow()
    _apply_threads(int(variables["LOCAL_WORLD_SIZE"]))
    _reseed_numpy()
    # The launcher shows the first failure, last and whole; nobody else shows theirs.
    sys.excepthook = _show_nothing
    _line_by_line(sys.stdout)
    _line_by_line(sys.stderr)
    _show_crashes()


def _apply_threads(local_world_size: int) -> None:
    import torch  # noqa: PLC0415 - in memory already; keeps the pure half of this module light

    threads = threads_per_rank(local_world_size, os.environ.get("OMP_NUM_THREADS"))
    # The libraries read their variables when they were loaded, before the fork: hence by call.
    torch.set_num_threads(threads)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.setdefault("MKL_NUM_THREADS", str(threads))


def _reseed_numpy() -> None:
    """Give this rank a random state of its own in NumPy: forks would all draw the same numbers."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


def _line_by_line(stream: TextIO) -> None:
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(line_buffering=True)


def _show_crashes() -> None:
    """Have Python write the stack of a crash (SIGSEGV, SIGABRT, ...): of the exit alone nobody learns where it was."""
    # Who has asked for it already has chosen how.
    if not faulthandler.is_enabled():
        faulthandler.enable(file=2, all_threads=False)


def _offer_stack(path: str) -> None:
    """Have this rank tell its stack when it can say nothing else. It trains without, too."""
    if path:
        with contextlib.suppress(OSError):
            silent.offer_stack(path)


def _exit_code(error: BaseException) -> int:
    """Return the exit code Python would end with."""
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


def _leave_word(error: BaseException, start: RankStart, exit_code: int, doorbell: int) -> bool:
    """Write down how this rank failed, for the launcher; return whether that was possible."""
    # Nothing may keep the rank from ending: neither a full disk nor an exception of the script's own making.
    with contextlib.suppress(Exception):
        written = failure.from_exception(error, start.rank, exit_code)
        failure.write(written, start.variables["RANKWISE_ERROR_FILE"])
        os.write(doorbell, b"!")
        return True
    return False


def _show_nothing(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Stand in for ``sys.excepthook`` where the launcher shows the error."""
