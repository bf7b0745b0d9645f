# SPDX-License-Identifier: Apache-2.0
"""``rankwise top``: the pace of every rank of a running job, in another terminal."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import sys
import time
from typing import TYPE_CHECKING, Any

from rankwise.cli.rank_table import NOTHING_YET, table
from rankwise.errors import LaunchError
from rankwise.launch.inspect import control_socket
from rankwise.launch.inspect.steps import line_of

if TYPE_CHECKING:
    import argparse
    from collections.abc import Generator

    from rankwise.launch.inspect.control_socket import RunningJob

HELP = "watch the pace of every rank of a running job"
DESCRIPTION = """\
Show how fast each rank of a job trains, what its time goes to, its memory, and the last values it logged, also those
of ranks on other machines. Below are the means of these values over all ranks.

Run it on any machine of the job. One that does not answer within 2 seconds is named, and its ranks are left out.

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
FOOTER = "s: stacks   q: quit"
FOOTER_LINES = 3
"""What the terminal has below the table: an empty line, the footer, and the line of the cursor."""
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
    is_terminal = _is_terminal()
    with _keys() if is_terminal else contextlib.nullcontext():
        while (answer := _ask_until_ended(job)) is not None:
            shown = f"{_CLEAR}{_screen(answer)}" if is_terminal else f"{line_of(answer) or NOTHING_YET}\n"
            sys.stdout.write(shown)
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


def _ask_until_ended(job: RunningJob) -> dict[str, Any] | None:
    try:
        return _ask(job)
    except LaunchError:
        if job.pid in {one.pid for one in control_socket.jobs()}:
            raise
        return None


def _is_terminal() -> bool:
    return sys.stdout.isatty() and sys.stdin.isatty()


def _screen(answer: dict[str, Any]) -> str:
    columns, lines = shutil.get_terminal_size()
    return f"{table(answer, os.terminal_size((columns, lines - FOOTER_LINES)))}\n{FOOTER}\n"


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
