# SPDX-License-Identifier: Apache-2.0
"""Two silent mistakes of scripts: ranks that never join and each train alone, and ranks that write one file.

Follows the steps of optimizers, and the files that are opened, in ranks that the launcher started. Imported by the
worker, which starts both, and by the coordinator, which repeats a report at the end.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rankwise.comm.session import has_joined
from rankwise.health.call_site import FOR_OTHERS, responsible_module
from rankwise.log import warn

if TYPE_CHECKING:
    import torch

OTHER_LIBRARIES = ("horovod", "byteps", "deepspeed", "hivemind", "torchft")
"""Libraries that can connect ranks without torch's default process group."""
_WHAT_TO_DO = (
    "use rankwise.join(), rankwise.DataLoader and rankwise.replicate(model), or start one rank: rankwise run -n 1"
)
MOST_FILES = 10_000
"""How many files of one rank are tracked."""
_NOT_FILES = ("/dev/", "/proc/", "/sys/")
_LOCKS = (".lock", ".lck")
_MEANS = ("rankwise.launch.", "rankwise.torch_private.", "rankwise.health.call_site")
"""Modules by which opened files are noticed."""


def watch_steps(world_size: int, note: str) -> None:
    """Report the first optimizer step of this process if it has not joined its peers by then.

    Writes the file ``note`` then, so that the launcher repeats the report at the end, and removes it at the first step
    after the process has joined: a script may train a reference on its own first.
    Called by: one of several ranks, before its script runs.
    """
    from rankwise.comm.step_hooks import Follower, Phase, follow  # noqa: PLC0415 - imports torch

    own_pid = os.getpid()

    class Watcher(Follower):
        is_alone = False

        def after_step(self, optimizer: torch.optim.Optimizer) -> None:
            if self.is_alone:
                self.is_alone = not forget_if_joined(note)
            elif not has_gradients(optimizer):
                return
            # A process that the script forked is not the rank.
            elif os.getpid() == own_pid and not _is_connected():
                warn(
                    f"rank 0 has taken an optimizer step without joining the other ranks: {world_size} ranks each "
                    f"train alone, and each writes the script's files; {_WHAT_TO_DO}"
                )
                self.is_alone = True
                with contextlib.suppress(OSError):
                    Path(note).touch()
            if not self.is_alone:
                end()

    end = follow(Watcher(), Phase.WATCH, is_kept=True)


def forget_if_joined(note: str) -> bool:
    """Remove the file ``note`` if this process has joined other ranks since; return whether it has."""
    if not Path(note).exists() or not _is_connected():
        return False
    Path(note).unlink(missing_ok=True)
    return True


def has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a step of ``optimizer`` may have changed parameters."""
    return any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])


def alone_reminder(world_size: int) -> str:
    """Return the last line of a job whose ranks trained alone."""
    return f"[rankwise] the script never joined: {world_size} ranks each trained alone; {_WHAT_TO_DO}\n"


def _is_connected() -> bool:
    """Return whether this process has joined other ranks in any way."""
    import torch.distributed as dist  # noqa: PLC0415 - in memory already

    if has_joined() or dist.is_initialized():
        return True
    return any(name in sys.modules for name in OTHER_LIBRARIES) or _is_connected_by_rpc()


def _is_connected_by_rpc() -> bool:
    from torch.distributed import rpc  # noqa: PLC0415 - takes a moment, and is needed once

    try:
        rpc.get_worker_info()
    except (AttributeError, RuntimeError):  # not started; or torch was built without it
        return False
    return True


# -- several ranks that write one file ------------------------------------------------------------------------
# Detected when the second one opens it, and reported once per job and machine. Python reports opened files by audit
# events, torch.save by a hook. The files each rank has opened are recorded in the job's temporary folder, as links
# named after the file whose target is the rank.


def watch_files(rank: int, error_file: str) -> None:
    """Track which files this process and its forks open for writing, in a folder next to ``error_file``.

    Called by: each of several ranks, once, before its script runs.
    """
    from rankwise.torch_private.processes import on_save  # noqa: PLC0415 - imports torch

    opened = _Opened(rank, Path(error_file).parent, Path(error_file).name.partition("-rank-")[0])

    def audit(event: str, args: tuple[object, ...]) -> None:
        # Called for every audit event of the process: the common case is this comparison.
        if event == "open" and isinstance(args[1], str) and "w" in args[1]:
            opened.note(args[0])

    on_save(opened.note)
    sys.addaudithook(audit)


class _Opened:
    def __init__(self, rank: int, folder: Path, attempt: str) -> None:
        self._rank = rank
        self._job_folder = f"{folder}/"
        self._links = folder / f"{attempt}-written"
        self._seen: set[str] = set()
        self._is_recording = False

    def note(self, name: object) -> None:
        """Record that ``name`` is about to be opened. Never raises: that would be the script's error."""
        if self._is_recording or not isinstance(name, str | bytes | os.PathLike) or len(self._seen) >= MOST_FILES:
            return
        # The code below opens files itself if the user's logging does.
        self._is_recording = True
        try:
            self._record(os.fsdecode(name))
        except Exception:  # noqa: BLE001, S110 - a full disk, a path that cannot be resolved
            pass
        finally:
            self._is_recording = False

    def _record(self, name: str) -> None:
        path = os.path.realpath(name)
        if path in self._seen or not _counts(name, path) or path.startswith(self._job_folder) or _is_ours():
            return
        self._seen.add(path)
        self._links.mkdir(exist_ok=True)
        link = self._links / hashlib.sha256(path.encode(errors="surrogateescape")).hexdigest()
        if _is_made(link, self._rank):
            return
        other = int(os.readlink(link))  # noqa: PTH115 - text, not a path
        # One report per job, by the rank that creates this link.
        if other != self._rank and _is_made(self._links / "told", self._rank):
            first, second = sorted((self._rank, other))
            warn(
                f"ranks {first} and {second} have both opened {name} for writing and overwrite each other's "
                "data; write on one rank only (`if world.rank == 0:`), or add the rank to the name",
                all_ranks=True,
            )


def _is_made(link: Path, rank: int) -> bool:
    """Create a link that holds ``rank``; return whether it did not exist."""
    try:
        link.symlink_to(str(rank))
    except FileExistsError:
        return False
    return True


def _counts(name: str, path: str) -> bool:
    """Return whether a file would be corrupted if two ranks write it: not a device, lock or cache."""
    if name.startswith(_NOT_FILES) or path.startswith(_NOT_FILES) or path.endswith(_LOCKS):
        return False
    if os.path.lexists(path) and not Path(path).is_file():
        return False
    # Caches are in hidden folders, and libraries share them on purpose; the script's own folder may be in one.
    return not any(part.startswith(".") for part in Path(path.removeprefix(f"{Path.cwd()}/")).parts)


def _is_ours() -> bool:
    """Return whether rankwise opens the file: the nearest caller that does not open files for others."""
    return responsible_module(_MEANS, FOR_OTHERS | {"torch"}).startswith("rankwise.")
