# SPDX-License-Identifier: Apache-2.0
"""The fork server: a copy of the launcher, forked once torch is imported, that forks the ranks.

It is the ranks' parent and their guard: when its launcher has exited for any reason, it kills what
is left of them. A rank exits without taking apart what it shares with the server. Does not know stores, restarts or
failures. Imported by the launcher's start.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import os
import select
import shutil
import signal
import socket
import sys
import time
import weakref
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, NoReturn, cast

from rankwise import meter
from rankwise.errors import LaunchError
from rankwise.health import preemption, process_probe
from rankwise.health.fork_safety import threads_are_known
from rankwise.launch.messages import (
    ClearRanks,
    FromForkServer,
    RankExited,
    RankNotStarted,
    RanksCleared,
    RankStart,
    RankStarted,
    SignalRank,
    decode,
    encode,
    receive_packet,
    send_packet,
)
from rankwise.world import processes
from rankwise.world.device.kinds import LOADS_PROFILER

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType, ModuleType

QUIET_SECONDS = 1.0
"""After how long without events there is time to import what only a restart needs."""
LAST_RESORT_SECONDS = 4
"""After how long the server stops waiting for a killed process that the kernel does not release."""
WAIT_SECONDS = 0.5
"""How long the launcher waits for the server before it checks whether it was interrupted."""

SAFE_TO_IMPORT = ("rankwise.", "torch.distributed.")
"""Names of modules that neither touch a device nor start a thread begin with one of these."""

_SLURM_STEP = "SLURM_STEP_ID"


class ForkServer:
    """The launcher's end: starts ranks, signals them, receives their exits. Closing it ends all."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self._connection = connection
        self._pid = pid

    def fileno(self) -> int:
        """Return the descriptor that is readable when a message has arrived."""
        return self._connection.fileno()

    def start(self, start: RankStart, streams: Sequence[int]) -> None:
        """Fork a rank with the three standard ``streams`` (descriptors), which remain open here."""
        send_packet(self._connection, encode(start), streams)

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to a rank's process; does nothing if it has exited."""
        self.wake()
        send_packet(self._connection, encode(SignalRank(rank=rank, number=number)))

    def wake(self) -> None:
        """Resume the server if it has been stopped (SIGSTOP)."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGCONT)

    def receive(self, between: Callable[[], None] = lambda: None) -> RankStarted | RankExited | RanksCleared:
        """Return the next message of the server, waiting for it.

        Args:
            between: called twice a second meanwhile.

        Raises:
            LaunchError: the server has exited, or could not start a rank.
        """
        while not select.select([self._connection], [], [], WAIT_SECONDS)[0]:
            between()
        data, _ = receive_packet(self._connection)
        if not data:
            raise LaunchError(
                "The process that starts the ranks was killed, and the ranks with it.",
                do="check `dmesg` for the out-of-memory killer",
            )
        message = decode(data, "the fork server")
        if isinstance(message, RankNotStarted):
            raise LaunchError(
                f"Rank {message.rank} could not be started: {message.why}.",
                do="start fewer ranks, or raise the limit of processes (ulimit -u)",
            )
        return cast("RankStarted | RankExited | RanksCleared", message)

    def clear(self) -> None:
        """Request that all ranks be killed, with everything they started; ``RanksCleared`` is received then."""
        self.wake()
        send_packet(self._connection, encode(ClearRanks()))

    def close(self) -> None:
        """Kill every rank and everything it has started, and end the server. Returns when they have exited."""
        self._connection.close()
        self.wake()
        with contextlib.suppress(ChildProcessError):
            first = os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOWAIT)
            since = process_probe.start_time_of(self._pid)
            os.waitpid(self._pid, 0)
            if first is not None and first.si_code != os.CLD_EXITED and since:
                processes.kill_since(int(since), LAST_RESORT_SECONDS)


def fork_server(
    run_rank: Callable[[RankStart], int],
    *,
    names: frozenset[str],
    folder: str,
    notify_pipe: int,
    expects_restarts: bool = False,
) -> ForkServer:
    """Fork the fork server off this process, which must have no threads yet.

    Returns in the launcher only. A rank runs ``run_rank`` and exits with its exit code, through the
    normal shutdown of the interpreter: what a script leaves open is closed, as under python.

    Args:
        run_rank: what each rank does; it is in memory before the fork, so nothing is pickled.
        names: those that the ranks use, as far as is known.
        folder: the job's temporary folder, which the server, the last to exit, removes.
        notify_pipe: the launcher's descriptor that must not remain open here.
        expects_restarts: whether the server uses idle time to import what ranks import while they train.

    Raises:
        LaunchError: the machine allows no more processes; the folder is then removed.
    """
    # Before the fork: imported after it, the two processes would copy each other's memory.
    _preload(names)
    keep_modules()
    gc.freeze()
    gc.enable()  # the caller imported with it disabled
    sys.stdout.flush()
    sys.stderr.flush()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # If the server is killed, processes started by ranks are reparented here.
    processes.adopt_orphans()
    try:
        with threads_are_known():  # those of BLAS
            pid = os.fork()
    except OSError as error:
        # There is no server to do it.
        shutil.rmtree(folder, ignore_errors=True)
        raise LaunchError(
            "This machine does not allow the launcher to start another process.",
            evidence=error.strerror,
            do="check ulimit -u, the pids limit of the container and free memory",
        ) from None
    if pid:
        theirs.close()
        return ForkServer(ours, pid)
    ours.close()
    os.close(notify_pipe)
    forget_finalizers()
    start = _ForkServerProcess(theirs, folder, expects_restarts=expects_restarts).serve()
    sys.exit(run_rank(start))


class _ForkServerProcess:
    """The server's end. ``serve`` returns in a forked rank only."""

    def __init__(self, connection: socket.socket, folder: str, *, expects_restarts: bool) -> None:
        self._connection = connection
        self._has_more_to_import = expects_restarts
        self._folder = folder
        self._ranks: dict[int, RankStart] = {}
        self._hangup = signal.getsignal(signal.SIGHUP)

    def serve(self) -> RankStart:
        os.setsid()
        processes.adopt_orphans()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)
        ended_r, ended_w = os.pipe()
        os.set_blocking(ended_w, False)
        signal.signal(signal.SIGCHLD, _wake)
        signal.set_wakeup_fd(ended_w)
        while True:
            is_quiet = self._has_more_to_import and bool(self._ranks)
            readable, _, _ = select.select([self._connection, ended_r], [], [], QUIET_SECONDS if is_quiet else None)
            if not readable:
                self._has_more_to_import = False
                _preload_for_restarts()
            if ended_r in readable:
                os.read(ended_r, 4096)
                self._reap()
            if self._connection in readable:
                start = self._handle_request()
                if start is not None:
                    signal.set_wakeup_fd(-1)
                    os.close(ended_r)
                    os.close(ended_w)
                    return start

    def _handle_request(self) -> RankStart | None:
        """Handle a request of the launcher; returns a value in a new rank only."""
        data, streams = receive_packet(self._connection, 3)
        if not data:
            self._end()
        match decode(data, "the launcher"):
            case RankStart() as start:
                return start if self._fork(start, streams) else None
            case SignalRank() as asked:
                for pid, start in self._ranks.items():
                    if start.rank == asked.rank:
                        os.kill(pid, asked.number)
            case _:
                self._kill_everything()
                self._report(RanksCleared())
        return None

    def _fork(self, start: RankStart, streams: Sequence[int]) -> bool:
        server_pid = os.getpid()
        try:
            with threads_are_known():
                pid = os.fork()
        except OSError as error:
            self._report(RankNotStarted(rank=start.rank, why=str(error.strerror)))
            pid = -1
        if pid == 0:
            self._become_rank(server_pid, streams)
            return True
        for stream in streams:
            os.close(stream)
        if pid > 0:
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)
            self._ranks[pid] = start
            self._report(RankStarted(rank=start.rank, pid=pid))
        return False

    def _become_rank(self, server_pid: int, streams: Sequence[int]) -> None:
        os.setpgid(0, 0)
        processes.die_with_parent()
        if os.getppid() != server_pid:
            os._exit(1)
        self._connection.close()
        leave_libraries_alone()
        for number in (signal.SIGTERM, signal.SIGQUIT, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        # Until the script joins, which handles it: Slurm, or the launcher, uses it to request a stop.
        signal.signal(signal.SIGUSR2, preemption.note_early)
        if _SLURM_STEP in os.environ:
            # Slurm signals every process of a step. The launcher decides, and ends ranks in other ways.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ignores_hangup = self._hangup == signal.SIG_IGN
        signal.signal(signal.SIGHUP, signal.SIG_IGN if ignores_hangup else signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        for stream in streams:
            if stream > 2:  # noqa: PLR2004 - the three standard streams
                os.close(stream)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._note(pid, status)

    def _note(self, pid: int, status: int) -> None:
        start = self._ranks.pop(pid, None)
        if start is not None:
            code = os.waitstatus_to_exitcode(status)
            self._report(RankExited(rank=start.rank, attempt=start.attempt, exit_code=code, time=time.time()))

    def _report(self, message: FromForkServer) -> None:
        with contextlib.suppress(OSError):
            send_packet(self._connection, encode(message))

    def _kill_everything(self) -> None:
        """Kill the ranks and what they started, in any session: orphans are reparented here."""
        for pid in self._ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        while True:
            for pid in processes.children():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            try:
                pid, status = os.waitpid(-1, 0)
            except ChildProcessError:
                return
            self._note(pid, status)

    def _end(self) -> NoReturn:
        # SIGALRM ends this process if the kernel does not release one of them.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(LAST_RESORT_SECONDS)
        self._kill_everything()
        shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(0)


def _wake(_number: int, _frame: FrameType | None) -> None:
    """Do nothing: without a handler, a signal would not wake the loop."""


def _preload(names: frozenset[str]) -> None:
    """Import once what every rank needs, and of rankwise what it uses: all of it takes as long as torch itself.

    None of it touches a device or starts a thread. What a script uses without naming it, each rank imports.
    """
    importlib.import_module("torch.distributed")
    if any(name.partition(".")[0] == "rankwise" for name in names):
        _bind_public_names(names)
    for name in sorted(names):
        if name.startswith(SAFE_TO_IMPORT):
            # A script may catch that it does not exist.
            with contextlib.suppress(ImportError):
                importlib.import_module(name)


def _bind_public_names(names: frozenset[str] | None = None) -> None:
    """Import public names of rankwise: all of them, or those in ``names``."""
    rankwise = importlib.import_module("rankwise")
    for name in rankwise.__all__:
        if names is None or name in names:
            getattr(rankwise, name)
    if names is None or "join" in names:
        meter.listener()


def _preload_for_restarts() -> None:
    """Import the rest of rankwise, and what torch's optimizers import on first use: a second of each rank's start."""
    from rankwise.torch_private.compiler import import_compiler  # noqa: PLC0415 - torch itself comes with _preload()

    _bind_public_names()
    import_compiler()


# -- how a rank exits: without taking apart what it shares with the fork server -----------------------------
# At exit Python clears every module, and C++ destroys the registries of every library. In a forked process both write
# to memory that is shared until then, which the kernel copies page by page: 0.2 s of processor time per rank. What the
# script has imported, opened and registered itself is taken apart as always.

_kept: dict[str, ModuleType] = {}
"""The modules of the fork server, once :func:`keep_modules` was called."""


def keep_modules() -> None:
    """Have this process, and those forked from it, not clear the modules that are imported now when they exit."""
    if not _kept:
        # Functions that are registered later run before it.
        atexit.register(_hide_modules)
    _kept.update(sys.modules)


def _hide_modules() -> None:
    # Functions that were registered before it run later, and may import these modules.
    sys.meta_path.insert(0, _KeptModules())
    for name in _kept.keys() - {"__main__", "builtins", "sys"}:
        if sys.modules.get(name) is _kept[name]:
            del sys.modules[name]


class _KeptModules(MetaPathFinder, Loader):
    """Finds hidden modules again: most libraries cannot be imported twice by one process."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        del path, target
        return ModuleSpec(fullname, self) if fullname in _kept else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _kept[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: it ran long ago. Called by Python."""


def forget_finalizers() -> None:
    """Have this process, and those forked from it, not call at exit what its libraries have registered until now.

    Torch has each of its operators unregistered: 0.05 s of processor time per rank.
    """
    # No public name lists them; without it, they are called.
    for finalizer in list(vars(weakref.finalize).get("_registry", ())):
        finalizer.atexit = False


def leave_libraries_alone() -> None:
    """End this process, when it exits, once the C library has called what is registered after this call.

    Called by: a rank, before its script. Does nothing where a library was loaded by the environment, as profilers are:
    it may write its results at the end. Built on on_exit(3) of glibc, which passes the exit code.
    """
    if os.environ.get("LD_PRELOAD") or os.environ.get(LOADS_PROFILER):
        return
    libc = ctypes.CDLL(None)
    with contextlib.suppress(AttributeError):
        on_exit, end, close_streams = libc.on_exit, libc["_exit"], libc.fcloseall
        # In reverse order: buffers of C streams are written first.
        on_exit(end, None)
        on_exit(close_streams, None)
