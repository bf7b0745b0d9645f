# SPDX-License-Identifier: Apache-2.0
"""``rankwise top``: the pace of every rank of a running job, in another terminal."""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import time
from typing import TYPE_CHECKING, Any

from rankwise.launch.inspect import control_socket
from rankwise.launch.inspect.steps import line_of

if TYPE_CHECKING:
    import argparse
    from collections.abc import Generator

    from rankwise.launch.inspect.control_socket import RunningJob

HELP = "watch the pace of every rank of a running job"
DESCRIPTION = """\
Show how fast each rank of a job on this machine trains, what its time goes to, its memory, and the values it logs.

The ranks notice nothing. In a terminal it is redrawn every second, with keys: s for their stacks, q to quit. Without
a terminal it prints one line a minute."""
EPILOG = """\
examples:
  rankwise top                your only job that `rankwise run` has started here
  rankwise top --job 4711     the job whose launcher is process 4711
  rankwise top --once         print one table and exit
  rankwise top --json         for a program"""

REDRAW_SECONDS = 1.0
LINE_SECONDS = 60.0
NOTHING_YET = "no rank has completed a step yet"
_CLEAR = "\x1b[H\x1b[J"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--job", type=int, metavar="PID", help="process id of the launcher")
    parser.add_argument("--once", action="store_true", help="print one table and exit")
    parser.add_argument("--json", action="store_true", help="print one line of JSON and exit")


def execute(options: argparse.Namespace) -> int:
    """Show the job until it ends or the user quits, and return the exit code."""
    job = control_socket.only_job(options.job, "top")
    if options.json:
        sys.stdout.write(json.dumps(_ask(job)) + "\n")
    elif options.once:
        sys.stdout.write(table(_ask(job)))
    else:
        with contextlib.suppress(KeyboardInterrupt):
            _watch(job)
    return 0


def _ask(job: RunningJob) -> dict[str, Any]:
    return control_socket.ask(job, {"kind": "steps"})


def _watch(job: RunningJob) -> None:
    is_terminal = sys.stdout.isatty() and sys.stdin.isatty()
    with _keys() if is_terminal else contextlib.nullcontext():
        while job.pid in {one.pid for one in control_socket.jobs()}:
            answer = _ask(job)
            sys.stdout.write(
                f"{_CLEAR}{table(answer)}\ns: stacks   q: quit\n" if is_terminal else f"{line_of(answer)}\n"
            )
            sys.stdout.flush()
            key = _pressed(REDRAW_SECONDS) if is_terminal else _slept(LINE_SECONDS)
            if key == "q":
                return
            if key == "s":
                stacks = control_socket.ask(job, {"kind": "stacks"})["text"]
                sys.stdout.write(f"{_CLEAR}{stacks}\nany key: back\n")
                sys.stdout.flush()
                _pressed(None)
    sys.stdout.write("the job has ended\n")


@contextlib.contextmanager
def _keys() -> Generator[None]:
    """Receive keys as they are pressed."""
    import termios  # noqa: PLC0415 - only in a terminal
    import tty  # noqa: PLC0415

    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _pressed(seconds: float | None) -> str:
    readable, _, _ = select.select([sys.stdin], [], [], seconds)
    return os.read(sys.stdin.fileno(), 1).decode(errors="replace") if readable else ""


def _slept(seconds: float) -> str:
    time.sleep(seconds)
    return ""


_COLUMNS = ("rank", "steps", "steps/s", "step", "data", "compute", "exchange", "rest", "memory", "now")


def table(answer: dict[str, Any]) -> str:
    """Return the answer of a launcher as a table, one line per rank."""
    if not answer["ranks"]:
        return f"{NOTHING_YET}\n"
    rows = [_COLUMNS, *(_row(rank, pace) for rank, pace in answer["ranks"].items())]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    values = [f"{name} {value:.4g}" for name, value in answer["values"].items() if value is not None]
    return "\n".join([*lines, *([""] if values else []), *values]) + "\n"


def _row(rank: str, pace: dict[str, Any]) -> tuple[str, ...]:
    parts, seconds = pace["parts"], pace["step_seconds"]
    compute = parts["forward"] + parts["backward"] + parts["optimizer"]
    rest = seconds - parts["data"] - compute - parts["exchange"]
    return (
        rank,
        f"{pace['steps']}",
        f"{1 / seconds:.1f}" if seconds else "",
        f"{seconds * 1e3:.1f} ms",
        *(f"{share / seconds:.0%}" if seconds else "" for share in (parts["data"], compute, parts["exchange"], rest)),
        f"{pace['memory_bytes'] / 2**20:.0f} MiB",
        f"{pace['now']}, {pace['seconds_in_step']:.1f} s",
    )
