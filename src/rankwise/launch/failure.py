# SPDX-License-Identifier: Apache-2.0
"""How a rank's end is written down, which failure came first, and the text a person sees.

Values and text only: reads and writes the one file a failing rank leaves, starts and stops nothing.
Imported by the worker, which writes, and by the agent, which reads.
"""

from __future__ import annotations

import json
import signal
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankwise.errors import PeerFailed, PeerMissing, fold_ranks, rank_prefix
from rankwise.launch.advice import advice_for

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_LOST_PEER_WORDS = (
    "connection closed by peer",
    "connection reset by peer",
    "connectfullmesh failed",
    "broken pipe",
    "connection was likely closed",
    "remote process exited or there was a network error",
)
"""What Gloo, NCCL and the store say when the process at the other end has died."""

LONGEST_TEXT = 1 << 16
LONGEST_BRIEF = 300
"""How much is shown of the message of a rank that failed after the first."""
OUT_OF_MEMORY = "by the kernel: the machine, or its memory limit, had no memory left"
KILLED = "by a person, a program or a scheduler, not by the kernel for memory"


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """How one rank failed."""

    rank: int
    type: str
    """Name of the exception class, or of the signal; ``"exit"`` where the process just ended."""
    message: str
    traceback: str
    """From the user's first frame on; empty where Python left none."""
    time: float
    """When, in seconds since the epoch."""
    secondary: bool
    """Whether it is only the echo of another rank's failure."""
    exit_code: int
    """Of the process as ``wait`` tells it: negative for a signal."""
    how: str = ""
    """In words, where exit code and signal do not tell it."""
    at: str = ""
    """Where a rank that was killed had last been seen, in words; empty where that is not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedAttempt:
    """How all ranks of one attempt ended, after one of them had failed."""

    attempt: int
    """0, then the number of the restart."""
    world_size: int
    failures: tuple[Failure, ...]
    """At least one, in the order of blame: what came first, then the rest, then the echoes."""
    ends: Mapping[int, str]
    """How each rank that did not fail ended, in a few words."""
    borne: tuple[int, ...] = ()
    """Ranks whose failure had not ended the others."""
    hostname: str = ""
    """Where the first failure happened."""
    stderr_tail: tuple[str, ...] = ()
    """The last lines that rank wrote, shown where there is no traceback."""
    log_path: str | None = None
    """Where its whole stderr is."""

    @property
    def first(self) -> Failure:
        """The failure to blame."""
        return self.failures[0]


def from_exception(error: BaseException, rank: int, exit_code: int) -> Failure:
    """Describe an uncaught exception whose traceback starts at the user's first frame."""
    is_exit = isinstance(error, SystemExit)
    return Failure(
        rank=rank,
        type=type(error).__name__,
        message=_cut(_text(error)),
        traceback="" if is_exit else _cut("".join(traceback.format_exception(error))),
        time=time.time(),
        secondary=_is_echo(error),
        exit_code=exit_code,
    )


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as problem:  # noqa: BLE001 - an exception of the user's may do anything
        return f"<its message cannot be read: {type(problem).__name__}>"


def _cut(text: str) -> str:
    """Return ``text`` with the middle left out where it is too long to be read, or sent."""
    if len(text) <= LONGEST_TEXT:
        return text
    head, tail = LONGEST_TEXT // 4, LONGEST_TEXT // 2
    return f"{text[:head]}\n... {len(text) - head - tail} characters are left out here ...\n{text[-tail:]}"


def from_exit(rank: int, exit_code: int, when: float, *, out_of_memory: bool | None = None, at: str = "") -> Failure:
    """Describe a process that ended badly without leaving word: a signal, or ``os._exit``.

    Args:
        rank: which one.
        exit_code: of the process as ``wait`` tells it.
        when: it ended, in seconds since the epoch.
        out_of_memory: whether the kernel has killed for memory meanwhile; ``None`` where that cannot be known.
        at: where it had last been seen, in words, where that is known.
    """
    name = signal_name(-exit_code) if exit_code < 0 else "exit"
    how = ""
    if exit_code == -signal.SIGKILL and out_of_memory is not None:
        by = OUT_OF_MEMORY if out_of_memory else KILLED
        how = f"killed by SIGKILL, exit code {shell_code(exit_code)}; {by}"
    return Failure(
        rank=rank,
        type=name,
        message="",
        traceback="",
        time=when,
        secondary=False,
        exit_code=exit_code,
        how=how,
        at=at,
    )


def from_stop(rank: int, seconds: float, when: float) -> Failure:
    """Describe a rank that somebody has stopped: its process is there, and does not run.

    Args:
        rank: which one.
        seconds: for how long.
        when: that was seen, in seconds since the epoch.
    """
    how = f"stopped for {seconds:.0f} s by SIGSTOP, Ctrl-Z or a debugger, while the other ranks ran"
    return _without_word(rank, "stopped", how, when, exit_code=-signal.SIGSTOP)


def from_lost_node(rank: int, hostname: str, when: float) -> Failure:
    """Describe a rank of a machine that is not heard of any more.

    Args:
        rank: any of its ranks.
        hostname: of the machine.
        when: it was given up, in seconds since the epoch.
    """
    how = f"{hostname} is lost: the machine or its network went down, or its launcher was killed"
    return _without_word(rank, "lost", how, when, exit_code=1)


def _without_word(rank: int, kind: str, how: str, when: float, *, exit_code: int) -> Failure:
    return Failure(
        rank=rank, type=kind, message="", traceback="", time=when, secondary=False, exit_code=exit_code, how=how
    )


def write(failure: Failure, path: str) -> None:
    """Write ``failure`` to ``path`` whole or not at all."""
    partial = Path(f"{path}.partial")
    partial.write_text(json.dumps(asdict(failure)), encoding="utf-8")
    partial.replace(path)


def read(path: str) -> Failure | None:
    """Return what a rank wrote to ``path``, or ``None`` where it wrote nothing."""
    try:
        return Failure(**json.loads(Path(path).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None


def by_blame(failures: Iterable[Failure]) -> tuple[Failure, ...]:
    """Return failures in the order they came, echoes of others last."""
    return tuple(sorted(failures, key=lambda failure: (failure.secondary, failure.time)))


def shell_code(exit_code: int) -> int:
    """Return an exit code as a shell tells it: 128 and the signal's number for a signal."""
    return 128 - exit_code if exit_code < 0 else exit_code


def signal_name(number: int) -> str:
    """Return ``SIGKILL`` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def report(failed: FailedAttempt) -> str:
    """Return the text for a person: the first failure, how the others ended, then the first failure's error, whole."""
    first = failed.first
    lines = [_first_line(failed)]
    if first.at:
        lines.append(f"[rankwise] it was last seen {first.at}")
    if failed.log_path:
        lines.append(f"[rankwise] its stderr is in {failed.log_path}")
    others = _ends_of_others(failed)
    lines += others
    if first.traceback:
        lines += [f"[rankwise] the error of rank {first.rank}:"] if others else []
        lines.append(first.traceback.rstrip("\n"))
    elif failed.stderr_tail:
        lines.append(f"[rankwise] the last lines rank {first.rank} wrote to stderr:")
        lines.extend(f"  {line}" for line in failed.stderr_tail)
    advice = advice_for(f"{first.type}: {first.message}")
    if advice is not None:
        lines.append(f"[rankwise] what to write instead: {advice}")
    return "\n".join(lines) + "\n"


def _ends_of_others(failed: FailedAttempt) -> list[str]:
    """Return how the other ranks ended, those that failed in the order they did; ranks that ended alike on one line."""
    ranks_of: dict[str, list[int]] = {}
    for one in failed.failures[1:]:
        came = "failed on the way" if one.rank in failed.borne else "then failed too"
        seen = f", last seen {one.at}" if one.at else ""
        ranks_of.setdefault(f"{came}: {briefly(one)[:LONGEST_BRIEF]}{seen}", []).append(one.rank)
    for rank, how in sorted(failed.ends.items()):
        ranks_of.setdefault(how, []).append(rank)
    return [f"[rankwise] {fold_ranks(ranks)} {how}" for how, ranks in ranks_of.items()]


def report_elsewhere(failed: FailedAttempt) -> str:
    """Return the one line for a machine whose launcher leaves the whole report to node 0's."""
    error = f" ({failed.first.type}: {failed.first.message.splitlines()[0]})" if failed.first.message else ""
    return f"{_first_line(failed)}{error}; node 0 shows it whole\n"


def _first_line(failed: FailedAttempt) -> str:
    who = rank_prefix(failed.first.rank, failed.world_size, failed.hostname or None)
    came_later = bool(failed.borne) and failed.first.rank not in failed.borne
    first = " first" if failed.world_size > 1 and not came_later else ""
    return f"[rankwise] {who} failed{first}: {in_words(failed.first)}"


def to_dict(value: Failure | FailedAttempt) -> dict[str, Any]:
    """Return a value as JSON can carry it."""
    return asdict(value)


def from_dict(told: Mapping[str, Any]) -> FailedAttempt:
    """Return the failed attempt that :func:`to_dict` was given."""
    fields: dict[str, Any] = {
        **told,
        "failures": tuple(Failure(**one) for one in told["failures"]),
        "ends": {int(rank): how for rank, how in told["ends"].items()},
        "borne": tuple(told["borne"]),
        "stderr_tail": tuple(told["stderr_tail"]),
    }
    return FailedAttempt(**fields)


def in_words(failure: Failure) -> str:
    """Return how a rank ended, in words."""
    if failure.how:
        return failure.how
    code = failure.exit_code
    if code >= 0:
        return f"exit code {code}"
    hint = ""
    if -code == signal.SIGKILL:
        hint = "; where nobody killed it, the machine was out of memory (see `dmesg`)"
    return f"killed by {signal_name(-code)}, exit code {shell_code(code)}{hint}"


def briefly(failure: Failure) -> str:
    """Return how a rank ended in a few words, for a line that says more: ``ValueError: boom``, ``SIGKILL``."""
    if failure.traceback:
        first_line = failure.message.strip().partition("\n")[0]
        return f"{failure.type}: {first_line}" if first_line else failure.type
    if failure.exit_code < 0 and failure.type != "stopped":
        return f"{failure.type}, {OUT_OF_MEMORY}" if OUT_OF_MEMORY in failure.how else failure.type
    return failure.how or f"exit code {failure.exit_code}"


def _is_echo(error: BaseException | None) -> bool:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, PeerFailed | PeerMissing):
            return True
        if isinstance(error, RuntimeError | OSError) and any(
            words in _text(error).lower() for words in _LOST_PEER_WORDS
        ):
            return True
        error = error.__cause__ or error.__context__
    return False
