# SPDX-License-Identifier: Apache-2.0
"""What a rank's process does from fork to exit: set up, run the target, record a failure.

Set up are variables, threads, streams, sockets and fixes for torch.
Opens no process group: that is the script's call to ``rankwise.join()``. Imported by the launcher's
start, before the fork server is forked.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import multiprocessing
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rankwise import meter
from rankwise.comm import session
from rankwise.health import process_probe
from rankwise.health.preemption import STOPPED_EXIT_CODE
from rankwise.launch.fork_server import torch_env
from rankwise.launch.fork_server.entrypoint import run_as_main
from rankwise.launch.report import failure
from rankwise.launch.report.failure import alone_note, crash_file, note_script_end, script_end_note
from rankwise.launch.report.ranks_alone import forget_if_joined, watch_files, watch_steps
from rankwise.world.environments.process import REPORT_OFF

if TYPE_CHECKING:
    from rankwise.launch.fork_server.entrypoint import Target
    from rankwise.launch.messages import RankStart

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
    own_pid = os.getpid()
    sys.excepthook = partial(_record_late, start, notify_pipe, own_pid)
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
                forget_if_joined(alone_note(start.variables["RANKWISE_ERROR_FILE"]))
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
    watch_files(start.rank, error_file)
    if "RANKWISE_GUARD" in start.variables:
        from rankwise.launch import replica_guard  # noqa: PLC0415 - imports what only guarded ranks need

        replica_guard.watch(int(start.variables["WORLD_SIZE"]))
    if start.rank == 0:
        watch_steps(int(start.variables["WORLD_SIZE"]), alone_note(error_file))


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


def _record_late(start: RankStart, notify_pipe: int, own_pid: int, *raised: Any) -> None:
    """Replace ``sys.excepthook`` where the launcher shows the error: show nothing.

    An error of the script has been recorded before; that of leaving the world, once the script has ended, is now.
    """
    if os.getpid() == own_pid and Path(script_end_note(start.variables["RANKWISE_ERROR_FILE"])).exists():
        _record_failure(raised[1], start, 1, notify_pipe)


# -- what is set up before the script runs -------------------------------------------------------------

OTHER_LAUNCHERS = ("TORCHELASTIC_", "ROLE_")
"""Variables of a torchrun around this launcher, which would describe its ranks rather than this launcher's."""
LONGEST_ADDRESS_BYTES = 107
"""Of a socket's address. Source: unix(7)."""
_LONGEST_NAME = "/listener-12345678"
"""As ``multiprocessing.connection`` names a socket."""


def set_up(variables: dict[str, str]) -> None:
    """Prepare this process to be the rank that ``variables`` describe."""
    for name in [name for name in os.environ if name.startswith(OTHER_LAUNCHERS)]:
        del os.environ[name]
    os.environ.update(variables)
    # As torchrun sets it; torch's own default does not abort communicators.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    torch_env.follow(variables)
    free_ddp_last()
    _apply_threads(int(variables["LOCAL_WORLD_SIZE"]))
    _reseed_numpy()
    _line_by_line(sys.stdout)
    _line_by_line(sys.stderr)
    _show_crashes(crash_file(variables["RANKWISE_ERROR_FILE"]))
    keep_sockets_in(str(Path(variables["RANKWISE_ERROR_FILE"]).parent))
    _offer_stack(variables.get("RANKWISE_STACK_FILE", ""))


def threads_per_rank(local_world_size: int, chosen: str | None) -> int:
    """Return the number of compute threads of a rank: its share of the cores, or the user's ``OMP_NUM_THREADS``.

    The latter may list a number per level of nesting.
    """
    first = (chosen or "").split(",")[0].strip()
    if first.isdecimal() and int(first) > 0:
        return int(first)
    return max(1, len(os.sched_getaffinity(0)) // local_world_size)


def _apply_threads(local_world_size: int) -> None:
    import torch  # noqa: PLC0415 - in memory already; keeps the pure half of this module light

    threads = threads_per_rank(local_world_size, os.environ.get("OMP_NUM_THREADS"))
    # The libraries read their variables when they were loaded, before the fork: hence by function calls.
    torch.set_num_threads(threads)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.setdefault("MKL_NUM_THREADS", str(threads))


def _reseed_numpy() -> None:
    """Give this rank its own random state in NumPy: otherwise all forks would draw the same numbers."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


def _line_by_line(stream: TextIO) -> None:
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(line_buffering=True)


def _show_crashes(path: str) -> None:
    """Have Python write the stack on a crash (SIGSEGV, SIGABRT, ...): the exit code does not show where it was.

    The launcher shows what this rank writes to ``path``; processes that it forks write to stderr.
    """
    # If the user has already enabled it, keep their settings.
    if faulthandler.is_enabled():
        return
    file: TextIO | int = 2
    with contextlib.suppress(OSError):
        file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115 - for the rest of the process
    faulthandler.enable(file, all_threads=False)
    os.register_at_fork(after_in_child=_show_crashes_on_stderr)


def _show_crashes_on_stderr() -> None:
    if faulthandler.is_enabled():
        faulthandler.enable(2, all_threads=False)


def _offer_stack(path: str) -> None:
    """Have this rank write its stack on request even if it cannot answer otherwise. It also trains without."""
    if path:
        with contextlib.suppress(OSError):
            process_probe.offer_stack(path)


def free_ddp_last() -> None:
    """Have DDP models created from now on release their group last, which releases the GIL meanwhile.

    If a script destroys its group first, DDP's reducer is the last to release it, and waits for Gloo's threads while
    it holds the GIL. Such a thread may be waiting for the GIL: it has just finished a collective of
    backward, and frees its Python objects. Then neither continues, and the rank never exits.
    """
    # Already in memory in a rank; a process that only starts ranks need not wait for torch.
    from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415

    initialize = DistributedDataParallel.__init__

    @functools.wraps(initialize)
    def __init__(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - torch's
        initialize(self, *args, **kwargs)
        # Attributes are freed in the order in which they were set.
        attributes = vars(self)
        attributes["process_group"] = attributes.pop("process_group")

    DistributedDataParallel.__init__ = __init__  # type: ignore[method-assign]


def keep_sockets_in(folder: str) -> None:
    """Have this process, and those that ``multiprocessing`` starts from it, keep sockets in ``folder``.

    Loader workers pass memory through such sockets. Python removes their folder when its process exits normally; a
    rank that is killed would leave it behind. ``tempfile`` and ``TMPDIR``, which a script uses for its own files, stay
    unchanged.
    Does nothing if the folder's path is too long for a socket address.
    Source: Python 3.11 to 3.14's ``multiprocessing.util.get_temp_dir``.
    """
    if len(os.fsencode(folder)) + len(_LONGEST_NAME) <= LONGEST_ADDRESS_BYTES:
        # Inherited by every process, forked or spawned. There is no public API, and a rank also works without.
        with contextlib.suppress(AttributeError):
            multiprocessing.current_process()._config["tempdir"] = folder  # type: ignore[attr-defined]  # noqa: SLF001
