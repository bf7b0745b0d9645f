# SPDX-License-Identifier: Apache-2.0
"""How a rank failed, as a value: built from its exception, whose traceback is trimmed, or from its exit.

Written to a file in the job's temporary folder, read from it, and ordered; also the names of the other files and notes
that a rank leaves there. Starts and stops no process. Imported by the worker, which writes the files, and by the agent,
which reads them.
"""

from __future__ import annotations

import contextlib
import json
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rankwise.errors import PeerFailed, PeerMissing
from rankwise.health.process_probe import lines_of_dump
from rankwise.health.traceback_folds import folded, formatted, line_of
from rankwise.launch.report.exit_code import OUT_OF_MEMORY, in_words, killed_in_words, signal_name
from rankwise.world.environments.process import shows_all_frames

if TYPE_CHECKING:
    from collections.abc import Iterable

_LOST_PEER_WORDS = (
    "connection closed by peer",
    "connection reset by peer",
    "connectfullmesh failed",
    "broken pipe",
    "connection was likely closed",
    "remote process exited or there was a network error",
)
"""Messages of Gloo, NCCL and the store if the process at the other end has died."""

LONGEST_TEXT = 1 << 16
LONGEST_CODE = 80
LONGEST_BRIEF = 300
"""How much of an error's first line is repeated in a line of the report."""
_LAUNCH = Path(__file__).parents[1]
_OWN_FRAMES = (
    str(_LAUNCH),
    str(_LAUNCH.parent / "compat" / "horovod" / "__main__.py"),
    str(_LAUNCH.parent / "auto"),
    "<frozen importlib",
)
"""Prefixes of the files of the launcher's own frames, which are above the user's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """How one rank failed."""

    rank: int
    type: str
    """Name of the exception class, or of the signal; ``"exit"`` if the process just exited."""
    message: str = ""
    traceback: str = ""
    """From the user's first frame on; empty if Python left none."""
    time: float
    """When, in seconds since the epoch."""
    secondary: bool = False
    """Whether it is only the echo of another rank's failure."""
    exit_code: int
    """The exit code as ``wait`` reports it: negative for a signal."""
    how: str = ""
    """A description, if exit code and signal do not show it."""
    at: str = ""
    """Where a killed rank was last seen, as text; empty if unknown."""
    line: str = ""
    """The user's line that raised, ``train.py:3``; empty if Python left no traceback."""

    @property
    def words(self) -> str:
        """How it exited."""
        return self.how or in_words(self.exit_code)

    @property
    def cause(self) -> str:
        """The error with its line, ``ValueError: boom, at train.py:3``, or how it exited without one."""
        if self.how or not self.traceback:
            return self.words
        brief = self.brief[:LONGEST_BRIEF]
        return f"{brief.removesuffix('.')}, at {self.line}" if self.line else brief

    @property
    def brief(self) -> str:
        """The same in short, for part of a line: ``ValueError: boom``, ``SIGKILL``."""
        if self.traceback:
            first_line = self.message.strip().partition("\n")[0]
            return f"{self.type}: {first_line}" if first_line else self.type
        if self.exit_code < 0 and self.type != "stopped":
            return f"{self.type}, {OUT_OF_MEMORY}" if OUT_OF_MEMORY in self.how else self.type
        return self.how or f"exit code {self.exit_code}"


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedAttempt:
    """How all ranks of one attempt exited, after one of them had failed."""

    attempt: int
    """0, then the number of the restart."""
    world_size: int
    failures: tuple[Failure, ...]
    """At least one, the cause first: in the order they failed, then the echoes."""
    ends: dict[int, str]
    """How each rank that did not fail exited, in short."""
    tolerated: tuple[int, ...] = ()
    """Ranks whose failure did not end the others."""
    hostname: str = ""
    """Where the first failure happened."""
    stderr_tail: tuple[str, ...] = ()
    """The last lines of that rank, shown if there is no traceback."""
    log_path: str | None = None
    """The file with its complete stderr."""

    @property
    def first(self) -> Failure:
        """The failure that is the cause."""
        return self.failures[0]


def trim(error: BaseException) -> None:
    """Cut the launcher's frames off the start of ``error``'s traceback: the user's come first."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_OWN_FRAMES):
        trace = trace.tb_next
    if trace is not None:
        error.__traceback__ = trace


def from_exception(error: BaseException, rank: int, exit_code: int) -> Failure:
    """Describe an uncaught exception whose traceback starts at the user's first frame."""
    code = repr(error.code)[:LONGEST_CODE] if isinstance(error, SystemExit) else ""
    line, function = line_of(error)
    return Failure(
        rank=rank,
        type=type(error).__name__,
        message=_cut(text_of(error)),
        traceback="" if code else _cut(formatted(error)),
        time=time.time(),
        secondary=_is_echo(error),
        exit_code=exit_code,
        line=line,
        how=f"called sys.exit({code}) at {line} in {function}" if code and line else "",
    )


def text_of(error: BaseException) -> str:
    """Return an exception's message; formatting an exception of the user's may raise another."""
    try:
        return str(error)
    except Exception as problem:  # noqa: BLE001 - as above
        return f"<its message cannot be read: {type(problem).__name__}>"


def _cut(text: str) -> str:
    """Return ``text`` without its middle if it is too long to be read or sent."""
    if len(text) <= LONGEST_TEXT:
        return text
    head, tail = LONGEST_TEXT // 4, LONGEST_TEXT // 2
    return f"{text[:head]}\n... {len(text) - head - tail} characters omitted ...\n{text[-tail:]}"


def from_exit(
    rank: int,
    exit_code: int,
    when: float,
    *,
    out_of_memory: bool | None = None,
    at: str = "",
    is_echo: bool = False,
    crash: str = "",
) -> Failure:
    """Describe a process that failed without recording it: by a signal, or ``os._exit``.

    ``out_of_memory``: whether the OOM killer has run meanwhile; ``at``: where it was last seen; ``is_echo``: whether it
    has recorded that only another rank's failure ended it; ``crash``: what Python wrote when it crashed.
    """
    name = signal_name(-exit_code) if exit_code < 0 else "exit"
    trace = _traceback_of_crash(crash)
    how = killed_in_words(exit_code, out_of_memory=out_of_memory) or (in_words(exit_code) if trace else "")
    return Failure(
        rank=rank, type=name, time=when, secondary=is_echo, exit_code=exit_code, how=how, at=at, traceback=trace
    )


def _traceback_of_crash(crash: str) -> str:
    """Return what ``faulthandler`` wrote as Python writes a traceback, from the user's first frame on."""
    lines = lines_of_dump(crash)
    outer = [number for number, line in enumerate(lines) if line.startswith(_OWN_FRAMES)]
    frames: list[str] = []
    for line in lines[outer[-1] + 1 if outer else 0 :]:
        place, _, function = line.rpartition(" in ")
        file, _, number = place.rpartition(":")
        frames.append(f'  File "{file}", line {number}, in {function}\n')
    title = "Traceback (most recent call last):\n" if frames else ""
    text = "".join((title, *frames, crash.partition("\n")[0]))
    return text if shows_all_frames() else folded(text)


def from_stop(rank: int, seconds: float, when: float) -> Failure:
    """Describe a rank that has been stopped for ``seconds``: its process exists, but does not run."""
    how = f"stopped for {seconds:.0f} s by SIGSTOP, Ctrl-Z or a debugger, while the other ranks were running"
    return Failure(rank=rank, type="stopped", time=when, exit_code=-signal.SIGSTOP, how=how)


def from_lost_node(rank: int, hostname: str, when: float) -> Failure:
    """Describe a rank of a machine that was declared lost."""
    how = f"{hostname} was lost: the machine or its network went down, or its launcher was killed"
    return Failure(rank=rank, type="lost", time=when, exit_code=1, how=how)


def write(failure: Failure, path: str) -> None:
    """Write ``failure`` to ``path`` atomically."""
    partial = Path(f"{path}.partial")
    partial.write_text(json.dumps(asdict(failure)), encoding="utf-8")
    partial.replace(path)


def read(path: str) -> Failure | None:
    """Return what a rank wrote to ``path``, or ``None`` if it wrote nothing."""
    try:
        return Failure(**json.loads(Path(path).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None


def causes_first(failures: Iterable[Failure]) -> tuple[Failure, ...]:
    """Return failures in the order they occurred, echoes last."""
    return tuple(sorted(failures, key=lambda failure: (failure.secondary, failure.time)))


def _is_echo(error: BaseException | None) -> bool:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, PeerFailed | PeerMissing):
            return True
        if isinstance(error, RuntimeError | OSError) and any(
            words in text_of(error).lower() for words in _LOST_PEER_WORDS
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


# -- the files that a rank leaves in the job's temporary folder for its launcher -----------------------


def error_file(folder: str, attempt: int, rank: int) -> str:
    """Return the path a rank writes its failure to."""
    return str(Path(folder) / f"attempt-{attempt}-rank-{rank}.json")


def torch_error_file(folder: str, attempt: int, rank: int) -> str:
    """Return the path torch elastic's ``@record`` writes the same to."""
    return str(Path(folder) / f"torch-attempt-{attempt}-rank-{rank}.json")


def stack_file(folder: str, attempt: int, rank: int) -> str:
    """Return the path a rank writes its stack to on request."""
    return str(Path(folder) / f"stack-attempt-{attempt}-rank-{rank}.txt")


def alone_note(error_file: str) -> str:
    """Return the file that a rank creates if it trains without having joined its peers."""
    return str(Path(error_file).with_suffix(".alone"))


def crash_file(error_file: str) -> str:
    """Return the file that Python writes a rank's stack to if it crashes, in an extension or in C."""
    return str(Path(error_file).with_suffix(".crash"))


def read_crash(error_file: str) -> str:
    """Return what a rank that crashed has written; empty if it has not crashed."""
    try:
        return Path(crash_file(error_file)).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""


def script_end_note(error_file: str) -> str:
    """Return the file that a rank creates when its script has run to the end.

    From then on the script no longer keeps the process alive: exit handlers, threads and destructors run, without
    a line of the script in the stack.
    """
    return str(Path(error_file).with_suffix(".over"))


def note_script_end(error_file: str) -> None:
    """Record that the script of this rank has ended; a full disk must not keep a rank from exiting."""
    with contextlib.suppress(OSError):
        Path(script_end_note(error_file)).touch()
