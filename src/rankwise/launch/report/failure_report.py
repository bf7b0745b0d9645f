# SPDX-License-Identifier: Apache-2.0
"""The report on a failed attempt: which rank failed first, how the others exited, the error, what to write instead.

The advice is a table of known errors of scripts written for other tools. A reporter shows the text: on a terminal, to a
caller of ``launch()``, or to another machine's launcher; another one writes it, restarts and notices into the folder of
the run's report too. Imported by the agent and by those that start it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rankwise.errors import fold_ranks
from rankwise.health.process_probe import start_time_of
from rankwise.launch.report.exit_code import OUT_OF_MEMORY
from rankwise.launch.report.failure import LONGEST_BRIEF
from rankwise.log import RED, colored
from rankwise.meter import FAILURE
from rankwise.world.device.kinds import ASK_FIRST, MISSING_GPU

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rankwise.launch.report.failure import FailedAttempt, Failure

_NO_NCCL = (
    'NCCL needs GPUs, but this rank sees none: write init_process_group(backend="gloo"), omit the backend '
    "(torch then chooses it), or call rankwise.join(), which chooses it for the device"
)
_NO_GPU = (
    f"this rank sees no GPU: {ASK_FIRST}, or use the device that "
    "rankwise.join() chooses: `world = rankwise.join(); model.to(world.device)`"
)
_NO_GROUP = (
    "call torch.distributed.init_process_group() before this line; under `rankwise run` it needs no arguments. Or call "
    "rankwise.join(), with rankwise.DataLoader for the sampler and rankwise.replicate(model) for the wrapper"
)
_TWICE = (
    "call init_process_group() once per process, and guard a second call with torch.distributed.is_initialized(); "
    "rankwise.join() has already called it if the script uses that"
)
_UNUSED = (
    "some parameters were not used in the loss: rankwise.replicate(model) needs no flag for that; with "
    "DistributedDataParallel pass find_unused_parameters=True"
)
_PORT_TAKEN = (
    "another process uses the script's port: remove init_method, since `rankwise run` has its "
    "own port that init_process_group() finds; run a script that starts its own processes under `rankwise run -n 1`, "
    "and pass a free port in init_method or MASTER_PORT"
)
_HOROVOD = (
    "rankwise implements Horovod's API: start the script with `rankwise horovodrun -np 4 python train.py`, "
    "unchanged, or write import rankwise.compat.horovod as hvd"
)
_MEGENGINE = (
    "rankwise implements MegEngine's API for several ranks, on torch's tensors and modules: start the script with "
    "`rankwise run -n 4 -m rankwise.compat.megengine train.py`, or write "
    "import rankwise.compat.megengine.distributed as dist"
)

_MEMORY = (
    "a smaller global_batch_size, fewer num_workers in each loader, or rankwise.shard(model), which splits parameters "
    "and optimizer state over the ranks; or raise the memory limit of the job (Slurm: --mem, containers: --memory)"
)
_NO_STDIN = (
    "stdin is empty if there are several ranks: debug with `rankwise run -n 1` in a "
    "terminal, or show where ranks are with `rankwise stacks`; pass input of the script as an "
    "argument"
)

_NO_WRAPPER = (
    "model in place of model.module: rankwise.replicate() and the other strategies act in place, without a wrapper"
)

WHAT_TO_DO = (
    # A torch without NCCL, then two with NCCL on a machine without GPUs.
    ("Distributed package doesn't have NCCL built in", _NO_NCCL),
    ("ProcessGroupNCCL is only supported with GPUs", _NO_NCCL),
    ("nccl2 requires at least one", _NO_NCCL),
    *((words, _NO_GPU) for words in MISSING_GPU),
    (
        "DistributedDataParallel device_ids and output_device arguments only work with",
        "omit device_ids and output_device for a model on the CPU; rankwise.replicate(model) needs neither",
    ),
    ("Default process group has not been initialized", _NO_GROUP),
    ("trying to initialize the default process group twice", _TWICE),
    ("Expected to have finished reduction in the prior iteration", _UNUSED),
    ("object has no attribute 'module'", _NO_WRAPPER),
    ("EADDRINUSE", _PORT_TAKEN),
    ("EOFError: EOF when reading a line", _NO_STDIN),
    ("BdbQuit: ", _NO_STDIN),
    (OUT_OF_MEMORY, _MEMORY),
    ("No module named 'horovod'", _HOROVOD),
    ("No module named 'megengine'", _MEGENGINE),
)
"""Parts of errors, mostly torch's, and their fixes; the first matching row is used."""


def whole(failed: FailedAttempt, *, advises: bool = True) -> str:
    """Return the full report: the first failure, how the others exited, then the first failure's complete error.

    Args:
        failed: the attempt.
        advises: whether known errors come with what to write instead, which is meant for scripts of several ranks.
    """
    first = failed.first
    lines = [_first_line(failed)]
    if first.at:
        lines.append(f"[rankwise] it was last seen {first.at}")
    if failed.log_path:
        lines.append(f"[rankwise] its stderr is in {failed.log_path}")
    others = [] if _is_common(failed) else _ends_of_others(failed)
    lines += others
    is_shown = not failed.log_path and failed.hostname in {"", socket.gethostname()}
    is_crash = bool(first.traceback and first.how)
    if first.traceback:
        lines += [f"[rankwise] the error of rank {first.rank}:"] if others else []
        lines.append(first.traceback.rstrip("\n"))
    needs_tail = is_crash or not first.traceback
    # What a script prints before it calls sys.exit() or crashes is on this machine's terminal already.
    if failed.stderr_tail and needs_tail and not (is_shown and (is_crash or first.type == SystemExit.__name__)):
        lines.append(f"[rankwise] the last lines rank {first.rank} wrote to stderr:")
        lines.extend(f"  {line}" for line in failed.stderr_tail)
    advice = advice_for(f"{first.type}: {first.message or first.how}") if advises else None
    if advice is not None:
        what = "do" if advice is _MEMORY else "write instead"
        lines.append(f"[rankwise] what to {what}: {advice}")
    return "\n".join(lines) + "\n"


def _ends_of_others(failed: FailedAttempt) -> list[str]:
    """Return how the other ranks exited, failures in order; ranks that exited alike share a line."""
    ranks_of: dict[str, list[int]] = {}
    for one in failed.failures[1:]:
        came = "failed earlier" if one.rank in failed.tolerated else "then also failed"
        seen = f", last seen {one.at}" if one.at else ""
        ranks_of.setdefault(f"{came}: {one.brief[:LONGEST_BRIEF]}{seen}", []).append(one.rank)
    for rank, how in sorted(failed.ends.items()):
        ranks_of.setdefault(how, []).append(rank)
    return [f"[rankwise] {fold_ranks(ranks)} {how}" for how, ranks in ranks_of.items()]


def one_line(failed: FailedAttempt) -> str:
    """Return the one line for a machine whose launcher leaves the full report to node 0's."""
    return f"{_first_line(failed)}; node 0 shows the full report\n"


def _first_line(failed: FailedAttempt) -> str:
    cause = failed.first.cause
    if _is_common(failed):
        alike = "failed with the same error: " if failed.first.traceback else ""
        return f"[rankwise] all {failed.world_size} ranks {alike}{cause}"
    where = f" ({failed.hostname})" if failed.hostname else ""
    came_later = bool(failed.tolerated) and failed.first.rank not in failed.tolerated
    first = " first" if failed.world_size > 1 and not came_later else ""
    return f"[rankwise] rank {failed.first.rank} of {failed.world_size}{where} failed{first}: {cause}"


def _is_common(failed: FailedAttempt) -> bool:
    """Return whether every rank raised the same error, or called ``sys.exit`` alike, in the same line."""
    is_everyone = 1 < failed.world_size == len(failed.failures)
    return is_everyone and bool(failed.first.line) and len({one.cause for one in failed.failures}) == 1


def advice_for(error: str) -> str | None:
    """Return the fix for an error, ``ValueError: its message``; ``None`` if unknown or if the error contains it."""
    if "\n  do  " in error:  # the last part of rankwise's own errors
        return None
    return next((advice for words, advice in WHAT_TO_DO if words in error), None)


# -- where the reports are shown -----------------------------------------------------------------------------


class Reporter(Protocol):
    """Called from the launcher's one thread."""

    def show(self, text: str) -> None:
        """Show complete lines."""
        ...

    def report(self, failed: FailedAttempt, text: str) -> None:
        """Show how an attempt failed; ``text`` is the report in complete lines."""
        ...

    def end(self, failures: Mapping[int, Failure]) -> None:
        """Receive how ranks of this machine failed in the last attempt; others may have continued without them."""
        ...


class TerminalReporter:
    """Shows everything on stderr."""

    def show(self, text: str) -> None:
        """Show complete lines; a full disk behind stderr is ignored."""
        with contextlib.suppress(OSError):
            sys.stderr.write(text)
            sys.stderr.flush()

    def report(self, failed: FailedAttempt, text: str) -> None:  # noqa: ARG002 - the text is complete
        """Show how an attempt failed."""
        first, newline, rest = text.partition("\n")
        self.show(colored(first, RED, is_terminal=sys.stderr.isatty()) + newline + rest)

    def end(self, failures: Mapping[int, Failure]) -> None:
        """Show nothing: everything has been shown."""


EVENTS = "events.jsonl"


def launcher_name() -> str:
    """Return what the events of this launcher and the records of its ranks name it by.

    A folder may hold those of other jobs.
    """
    pid = os.getpid()
    return f"{socket.gethostname()}:{pid}:{start_time_of(pid)}"


class RecordingReporter:
    """Passes everything to another reporter, and records it.

    Args:
        inner: what shows it.
        folder: an existing folder.
    """

    def __init__(self, inner: Reporter, folder: str) -> None:
        self._inner = inner
        self._path = Path(folder) / EVENTS

    def show(self, text: str) -> None:
        """Show complete lines."""
        self._record({"kind": "notice", "text": text})
        self._inner.show(text)

    def report(self, failed: FailedAttempt, text: str) -> None:
        """Show how an attempt failed."""
        self._record({"kind": FAILURE, "rank": failed.first.rank, "text": text})
        self._inner.report(failed, text)

    def end(self, failures: Mapping[int, Failure]) -> None:
        """Receive how ranks failed in the last attempt."""
        self._inner.end(failures)

    def _record(self, event: dict[str, object]) -> None:
        # A full disk must not end the job.
        with contextlib.suppress(OSError), self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"time": time.time(), "launcher": launcher_name(), **event}) + "\n")
