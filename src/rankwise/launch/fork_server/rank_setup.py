# SPDX-License-Identifier: Apache-2.0
"""What is set up in a rank's process before its script runs: variables, threads, streams, sockets, fixes for torch.

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
    _show_crashes()
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


def _show_crashes() -> None:
    """Have Python write the stack on a crash (SIGSEGV, SIGABRT, ...): the exit code does not show where it was."""
    # If the user has already enabled it, keep their settings.
    if not faulthandler.is_enabled():
        faulthandler.enable(file=2, all_threads=False)


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
