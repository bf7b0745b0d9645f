# SPDX-License-Identifier: Apache-2.0
"""Forwards the output of the ranks: whole lines, prefixed, and to files on request; and one line about the whole job.

One thread reads every rank's pipes, so no rank waits for another. Decides nothing about ranks.
Imported by the launcher's start, by the agent and by ``ssh``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import selectors
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from rankwise.errors import rank_prefix
from rankwise.launch.agent.own_losses import OwnLosses
from rankwise.log import WARNING, YELLOW, colored

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

STDOUT = 1
STDERR = 2
TAIL_LINES = 20
"""How many of a rank's last stderr lines are kept, to be shown if it left no traceback."""
LINE_WAIT_SECONDS = 0.2
"""After how long an unfinished line (a prompt, a progress bar) is shown."""
LONGEST_LINE_BYTES = 1 << 16
LINE_ENDS = (b"\n", b"\r")
_OF_RANK = WARNING.encode() + b" [rank "
_CLEARS_LINE = b"\r\x1b[K"
_SHOWN_HERE = "; from now on the output of that rank is shown here"
_LOST = "; from now on the output of that rank is lost"


class LinePrefix:
    """Prefixes each line of one stream with a text, except those that name their rank already.

    Args:
        text: the prefix; an empty one leaves the stream unchanged.
        before: what a terminal needs at each line's start.
        warning: how a line that is a warning of rankwise starts.
    """

    def __init__(self, text: bytes = b"", *, before: bytes = b"", warning: bytes = WARNING.encode()) -> None:
        self._text = text
        self._before = before
        self._warning = warning
        self._is_at_line_start = True

    def applied_to(self, data: bytes) -> bytes:
        """Return ``data`` with the prefix at every line's start, and after every carriage return."""
        if not self._text:
            return data
        pieces: list[bytes] = []
        for piece in data.splitlines(keepends=True):
            is_blank_return = piece == b"\r"
            if self._is_at_line_start and not is_blank_return:
                pieces += [self._before, b"" if piece.startswith(_OF_RANK) else self._text]
            is_warning = self._is_at_line_start and piece.startswith(WARNING.encode())
            pieces.append(self._warning + piece[len(WARNING) :] if is_warning else piece)
            self._is_at_line_start = piece.endswith(LINE_ENDS)
        return b"".join(pieces)


def prefix_of(rank: int, world_size: int, *, is_tty: bool) -> LinePrefix:
    """Return the prefix of a rank's stderr. On a terminal, rank 0's progress bar may be in the line: it is cleared."""
    return LinePrefix(
        rank_prefix(rank, world_size).encode() + b" ",
        before=_CLEARS_LINE if is_tty else b"",
        warning=colored(WARNING, YELLOW, is_terminal=is_tty).encode(),
    )


class Terminal:
    """One of the launcher's own streams. Knows the owner of the unfinished line in it."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.is_gone = False
        self.problem = ""
        """Why it cannot be written to, unless its reader has closed it: the file, and the system's message."""
        self._open_line_of: object = None

    @property
    def is_tty(self) -> bool:
        """Whether it is a terminal."""
        return os.isatty(self.descriptor)

    def write(self, data: bytes, owner: object, *, ends_line: bool) -> None:
        """Write ``data`` of ``owner``, below an unfinished line of another owner."""
        if self._open_line_of not in (None, owner):
            data = b"\n" + data
        self._open_line_of = None if ends_line else owner
        try:
            while data:
                try:
                    data = data[os.write(self.descriptor, data) :]
                except BlockingIOError:
                    # Another program made the stream non-blocking, and its reader is slow.
                    select.select([], [self.descriptor], [])
        except OSError as error:
            # The reader has exited (`| head`). The ranks notice as under python: by a broken pipe.
            self.is_gone = True
            if error.errno != errno.EPIPE:
                self.problem = f"{_file_of(self.descriptor)}: {error.strerror}"


@dataclass(eq=False, kw_only=True)
class Lines:
    """One stream to a terminal: whole lines at once, an unfinished line after a moment."""

    terminal: Terminal | None
    """``None`` shows nothing."""
    prefix: LinePrefix = field(default_factory=LinePrefix)
    tail: deque[bytes] | None = None
    """Called with each non-empty line."""
    watch: Callable[[Sequence[bytes]], None] | None = None
    """Called with whole lines after they were shown."""
    pending: bytes = b""
    since: float = field(default_factory=time.monotonic)
    """When the last data arrived."""

    def add(self, data: bytes) -> None:
        """Show the lines that ``data`` completes."""
        self.pending += data
        self.since = time.monotonic()
        end = max(self.pending.rfind(mark) for mark in LINE_ENDS) + 1
        self._show(end if len(self.pending) - end < LONGEST_LINE_BYTES else len(self.pending))

    def show_rest(self, *, after_seconds: float = 0.0) -> None:
        """Show the unfinished line if it has been waiting that long."""
        if time.monotonic() - self.since >= after_seconds:
            self._show(len(self.pending))

    def _show(self, num_bytes: int) -> None:
        shown, self.pending = self.pending[:num_bytes], self.pending[num_bytes:]
        if not shown:
            return
        if self.tail is not None:
            self.tail.extend(line for line in shown.splitlines() if line.strip())
        if self.terminal is not None and not self.terminal.is_gone:
            self.terminal.write(self.prefix.applied_to(shown), self, ends_line=shown.endswith(b"\n"))
        if self.watch is not None:
            self.watch([line for line in shown.splitlines(keepends=True) if line.endswith(b"\n")])


@dataclass(eq=False, kw_only=True)
class _Stream(Lines):
    """The read end of one stream of one rank."""

    descriptor: int
    number: int
    file: BinaryIO | None = None


class Output:
    """Forwards the streams of all ranks, from ``open_rank`` to ``drain``, when all have exited.

    Its many fields are what its thread needs: the streams to read, where to show them, and whether all have ended.
    """

    def __init__(self, log_dir: str | None = None, *, controller: bool = False) -> None:
        """``controller``: rank 0 alone runs a script. It reads stdin, and its lines are shown as they are."""
        self._has_controller = controller
        self._losses = OwnLosses()
        self._log_dir = Path(log_dir) if log_dir is not None else None
        self._terminals = {STDOUT: Terminal(STDOUT), STDERR: Terminal(STDERR)}
        self._tails: dict[int, deque[bytes]] = {}
        self._selector = selectors.DefaultSelector()
        self._wake_r, self._wake_w = os.pipe()
        os.set_blocking(self._wake_r, False)
        self._selector.register(self._wake_r, selectors.EVENT_READ)
        self._reported: list[Terminal] = []
        self._arrivals: deque[_Stream] = deque()
        self._all_over = threading.Condition()
        self._num_open = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._carry, name="rankwise-output", daemon=True)
        self._thread.start()

    def open_rank(self, rank: int, world_size: int, attempt: int = 0) -> list[int]:
        """Return descriptors for a rank's stdin, stdout and stderr, for the caller to close.

        A world of one has the launcher's own streams. Otherwise stdin is empty, unless rank 0 is to read it; rank 0
        writes to a terminal itself, so that colors and progress bars work; everything else is forwarded here.
        """
        if world_size == 1 and self._log_dir is None:
            return [os.dup(0), os.dup(STDOUT), os.dup(STDERR)]
        reads_stdin = world_size == 1 or (rank == 0 and self._has_controller)
        stdin = os.dup(0) if reads_stdin else os.open(os.devnull, os.O_RDONLY)
        tail: deque[bytes] | None = None
        if not (rank == 0 and self._has_controller):
            tail = self._tails[rank] = deque(maxlen=TAIL_LINES)
        return [
            stdin,
            self._open(rank, world_size, attempt, STDOUT, None),
            self._open(rank, world_size, attempt, STDERR, tail),
        ]

    def stderr_tail(self, rank: int) -> Sequence[str]:
        """Return the last lines a rank wrote to stderr through this process."""
        return [line.decode("utf-8", "replace") for line in self._tails.get(rank, ())]

    def log_path(self, rank: int, attempt: int = 0, number: int = STDERR) -> str | None:
        """Return the log file of a rank's stream, if there is one."""
        if self._log_dir is None:
            return None
        restart = f".restart-{attempt}" if attempt else ""
        return str(self._log_dir / f"rank-{rank}{restart}.{'out' if number == STDOUT else 'err'}")

    @property
    def keeps_logs(self) -> bool:
        """Whether the output of ranks is kept in files."""
        return self._log_dir is not None

    def append_to_log(self, rank: int, attempt: int, text: str) -> None:
        """Append text that the rank did not write itself to the log file of its stderr, if there is one."""
        path = self.log_path(rank, attempt)
        if path is not None:
            # The report repeats it all.
            with (
                contextlib.suppress(OSError),
                Path(path).open("a", encoding="utf-8", errors="backslashreplace") as file,
            ):
                file.write(text)

    def problem(self) -> str:
        """Return why ranks cannot write: the launcher's own stream that cannot be written to; else an empty text."""
        return next((one.problem for one in self._reported), "") if self._log_dir is None else ""

    def drain(self, timeout_seconds: float = 2.0) -> None:
        """Wait until all output of the ranks has been shown; they have all exited."""
        with self._all_over:
            self._all_over.wait_for(lambda: self._num_open == 0, timeout_seconds)

    def close(self) -> None:
        """Stop the thread, unless it is blocked by the reader of its output."""
        self._is_closed = True
        os.write(self._wake_w, b"!")
        self._thread.join(1.0)
        if not self._thread.is_alive():
            self._selector.close()
            descriptors_closed([self._wake_r, self._wake_w])

    def _open(self, rank: int, world_size: int, attempt: int, number: int, tail: deque[bytes] | None) -> int:
        terminal = self._terminals[number]
        if rank == 0 and self._log_dir is None and terminal.is_tty:
            return os.dup(number)
        reader, writer = os.pipe()
        path = self.log_path(rank, attempt, number)
        stream = _Stream(descriptor=reader, number=number, terminal=terminal, tail=tail)
        if number == STDOUT and not self._has_controller:
            stream.watch = partial(self._compare_losses, attempt, rank)
        if tail is not None:
            stream.prefix = prefix_of(rank, world_size, is_tty=terminal.is_tty)
        if path is not None:
            try:
                stream.file = Path(path).open("ab")  # noqa: SIM115 - closed with the stream
            except OSError as error:
                self.say(f"cannot write to {path}: {error.strerror}{_SHOWN_HERE}")
            else:
                stream.prefix = LinePrefix() if rank == 0 else stream.prefix
                stream.terminal = terminal if rank == 0 else None
        with self._all_over:
            self._num_open += 1
        self._arrivals.append(stream)
        os.write(self._wake_w, b"!")
        return writer

    # -- the thread --------------------------------------------------------------------------------

    def _carry(self) -> None:
        streams: set[_Stream] = set()
        while not self._is_closed:
            waits_for_rest = any(stream.pending for stream in streams)
            for key, _ in self._selector.select(LINE_WAIT_SECONDS if waits_for_rest else None):
                if key.fd == self._wake_r:
                    os.read(self._wake_r, 4096)
                elif not self._read(key.data):
                    streams.discard(key.data)
            while self._arrivals:
                stream = self._arrivals.popleft()
                self._selector.register(stream.descriptor, selectors.EVENT_READ, stream)
                streams.add(stream)
            for stream in streams:
                stream.show_rest(after_seconds=LINE_WAIT_SECONDS)

    def _keep(self, stream: _Stream, data: bytes) -> None:
        """Write to the stream's file; stop writing if that fails: a full disk must not stop the ranks."""
        if stream.file is None:
            return
        try:
            stream.file.write(data)
            stream.file.flush()
        except OSError as error:
            with contextlib.suppress(OSError):
                stream.file.close()
            terminal = self._terminals[stream.number]
            where = _LOST if terminal.is_gone else _SHOWN_HERE
            self.say(f"stopped writing to {stream.file.name}: {error.strerror}{where}")
            stream.file = None
            stream.terminal = terminal

    def say(self, text: str) -> None:
        """Print a line on stderr, or on stdout if stderr cannot be written to; below an unfinished line of a rank."""
        words = f"[rankwise] {text}\n".encode()
        for number in (STDERR, STDOUT):
            if not self._terminals[number].is_gone:
                self._terminals[number].write(words, self, ends_line=True)
                if not self._terminals[number].is_gone:
                    return

    def _report_problem(self, terminal: Terminal) -> None:
        """Report once why one of the launcher's own streams cannot be written to, unless its reader has closed it."""
        if not terminal.problem or terminal in self._reported:
            return
        self._reported.append(terminal)
        if self._log_dir is None:
            what = (
                "from now on writes of the ranks fail with a broken pipe; free space, or pass "
                "--log-dir DIR, with which the ranks continue"
            )
        else:
            what = f"the ranks continue; their output is kept in {self._log_dir}, as far as there is space"
        self.say(f"{terminal.problem}; {what}")

    def _compare_losses(self, attempt: int, rank: int, lines: Sequence[bytes]) -> None:
        text = self._losses.notice(attempt, rank, lines)
        if text:
            self.say(text)

    def _is_over(self, stream: _Stream) -> bool:
        """Return whether nothing takes the stream's data; one with a log file continues after a full disk."""
        terminal = stream.terminal
        if terminal is None or not terminal.is_gone:
            return False
        self._report_problem(terminal)
        if terminal.problem and self._log_dir is not None:
            stream.terminal = None
            return False
        return True

    def _read(self, stream: _Stream) -> bool:
        """Read the available data; return whether there may be more."""
        data = os.read(stream.descriptor, 1 << 16)
        if stream.file is not None:
            self._keep(stream, data)
        is_over = not data or self._is_over(stream)
        stream.add(data)
        if is_over:
            stream.show_rest()
        # The write that failed may be the one just made.
        is_over = is_over or self._is_over(stream)
        if is_over:
            self._selector.unregister(stream.descriptor)
            os.close(stream.descriptor)
            if stream.file is not None:
                stream.file.close()
            with self._all_over:
                self._num_open -= 1
                self._all_over.notify_all()
        return not is_over


def _file_of(descriptor: int) -> str:
    """Return the name of an open file. Source: proc_pid_fd(5)."""
    try:
        return str(Path(f"/proc/self/fd/{descriptor}").readlink())
    except OSError:
        return "stdout" if descriptor == STDOUT else "stderr"


def descriptors_closed(descriptors: Sequence[int]) -> None:
    """Close each descriptor."""
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)


# -- the line about the whole job ------------------------------------------------------------------------

STATUS_REDRAW_SECONDS = 0.5
STATUS_LINE_SECONDS = 60.0
STATUS_CLOSE_SECONDS = 2.0
"""How long the end waits for a text that is being made."""
_SAVE, _RESTORE, _CLEAR = "\x1b7", "\x1b8", "\x1b[2K"


class StatusLine:
    """One line about the whole job while it runs: at the bottom of a terminal, else once a minute; until closed.

    In a terminal the lines above scroll as before, also those that rank zero writes, which do not pass the launcher.

    Args:
        describe: returns the text, without its end; empty while there is nothing to tell. Called in a thread: it may
            read files and wait for other machines.
    """

    def __init__(self, describe: Callable[[], str]) -> None:
        self._describe = describe
        self._is_terminal = sys.stderr.isatty()
        self._next = 0.0
        self._size: os.terminal_size | None = None
        """Of the terminal, once its last line is kept for this."""
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None
        """What shows the text now, or showed it last."""

    def update(self, now: float) -> None:
        """Show the text if it is due, without blocking the caller."""
        if (self._thread is None or not self._thread.is_alive()) and now >= self._next:
            self._thread = threading.Thread(target=self._show, name="rankwise-status", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Give the last line back to the terminal."""
        self._is_closed.set()
        if self._thread is not None:
            self._thread.join(STATUS_CLOSE_SECONDS)
        if self._size is not None:
            _write(f"{_SAVE}\x1b[r\x1b[{self._size.lines};1H{_CLEAR}{_RESTORE}")
            self._size = None

    def _show(self) -> None:
        text = self._describe()
        self._next = time.monotonic() + (
            STATUS_LINE_SECONDS if text and not self._is_terminal else STATUS_REDRAW_SECONDS
        )
        if not text or self._is_closed.is_set():
            return
        if self._is_terminal:
            self._draw(text)
        else:
            _write(f"[rankwise] {text}\n")

    def _draw(self, text: str) -> None:
        with contextlib.suppress(OSError):
            size = os.get_terminal_size(sys.stderr.fileno())
            start = ""
            if size != self._size:
                # An empty line first, so that the cursor is not on the last one, which no longer scrolls.
                start = f"\n{_SAVE}\x1b[1;{size.lines - 1}r{_RESTORE}\x1b[1A"
                self._size = size
            _write(f"{start}{_SAVE}\x1b[{size.lines};1H{_CLEAR}{text[: size.columns - 1]}{_RESTORE}")


def _write(text: str) -> None:
    with contextlib.suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()
