# SPDX-License-Identifier: Apache-2.0
"""What is set up in a rank's process before its script runs: variables, threads, streams, sockets, torch's corners.

Opens no process group. Imported by the worker and, for the number of threads, by the launcher's start.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any, TextIO

from rankwise.health import process_probe
from rankwise.launch.fork_server import torch_env

OTHER_LAUNCHERS = ("TORCHELASTIC_", "ROLE_")
"""Variables of a torchrun around this launcher, which would describe its ranks and not ours."""
LONGEST_ADDRESS_BYTES = 107
"""Of a socket's address. Source: unix(7)."""
_LONGEST_NAME = "/listener-12345678"
"""As ``multiprocessing.connection`` names a socket."""


def set_up(variables: dict[str, str]) -> None:
    """Prepare this process to be the rank that ``variables`` describe."""
    for name in [name for name in os.environ if name.startswith(OTHER_LAUNCHERS)]:
        del os.environ[name]
    os.environ.update(variables)
    # As torchrun sets it; torch's own default aborts no communicator.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    torch_env.follow(variables)
    free_ddp_last()
    _apply_threads(int(variables["LOCAL_WORLD_SIZE"]))
    _reseed_numpy()
    _line_by_line(sys.stdout)
    _line_by_line(sys.stderr)
    _show_crashes()
    keep_sockets_in(str(Path(variables["RANKWISE_ERROR_FILE"]).parent))
    _offer_stack(variables.get("RANKWISE_STACK_FILE", ""))


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
            process_probe.offer_stack(path)


def free_ddp_last() -> None:
    """Have models of DDP that are made from now on release their group last, which gives the lock back meanwhile.

    Where a script destroys its group first, DDP's reducer is the last to release it, and waits for gloo's threads while
    it holds the interpreter's lock. Such a thread may be waiting for the lock: it has just carried out a collective of
    backward, and frees what that kept of Python. Then neither continues, and the rank never exits.
    """
    # In memory already in a rank; a process that only starts ranks need not wait for torch.
    from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415

    initialize = DistributedDataParallel.__init__

    @functools.wraps(initialize)
    def __init__(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401, N807 - torch's
        initialize(self, *args, **kwargs)
        # Attributes are freed in the order in which they were set.
        attributes = vars(self)
        attributes["process_group"] = attributes.pop("process_group")

    DistributedDataParallel.__init__ = __init__  # type: ignore[method-assign]


def keep_sockets_in(folder: str) -> None:
    """Have this process, and those that ``multiprocessing`` starts from it, keep sockets in ``folder``.

    Workers of loaders pass memory through such sockets. Python removes their folder when its process exits normally; a
    rank that is killed would leave it behind. ``tempfile`` and ``TMPDIR``, which a script uses for its own files, stay
    as they are.
    Nothing changes where the folder's path is too long for the address of a socket.
    Source: Python 3.11 to 3.14's ``multiprocessing.util.get_temp_dir``.
    """
    if len(os.fsencode(folder)) + len(_LONGEST_NAME) <= LONGEST_ADDRESS_BYTES:
        # Inherited by every process, forked or spawned. There is no public way, and a rank can do without.
        with contextlib.suppress(AttributeError):
            multiprocessing.current_process()._config["tempdir"] = folder  # type: ignore[attr-defined]  # noqa: SLF001
