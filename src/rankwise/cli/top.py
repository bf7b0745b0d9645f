# SPDX-License-Identifier: Apache-2.0
"""``rankwise top`` and ``rankwise stacks``: the pace of every rank of a running job, and where it is."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import sys
import time
from typing import TYPE_CHECKING, Any

from rankwise.cli.arguments import Command
from rankwise.errors import LaunchError, fold_ranks
from rankwise.launch.inspect import control_socket
from rankwise.launch.inspect.stacks import line_of, num_hosts, number_text, unanswered_line

if TYPE_CHECKING:
    import argparse
    from collections.abc import Generator, Sequence

    from rankwise.launch.inspect.control_socket import RunningJob

TOP_REDRAW_SECONDS = 1.0
TOP_LINE_SECONDS = 60.0
FOOTER = "s: stacks   q: quit"
FOOTER_LINES = 3
"""What the terminal has below the table: an empty line, the footer, and the line of the cursor."""
_CLEAR = "\x1b[H\x1b[J"
NOTHING_YET = "no rank has completed a step yet"
MOST_VALUES = 3
"""How many logged values have a column."""
_COLUMNS = ("steps", "steps/s", "step", "data", "compute", "exchange", "rest", "memory", "now")
_GAP = "  "


def _add_top_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--job", type=int, metavar="PID", help="process id of the launcher")
    parser.add_argument("--once", action="store_true", help="print one table and exit")
    parser.add_argument("--json", action="store_true", help="print one line of JSON and exit")


def _run_top(options: argparse.Namespace) -> int:
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
            key = _pressed(TOP_REDRAW_SECONDS) if is_terminal else _slept(TOP_LINE_SECONDS)
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


def table(answer: dict[str, Any], size: os.terminal_size | None = None) -> str:
    """Return the answer of a launcher as a table that fits into a terminal, if it is for one of ``size``.

    Where not all ranks fit, those are shown whose values are not finite, and then those that work longest.
    """
    above = [f"{unanswered_line(answer)}\n"] if answer["unanswered"] else []
    if not answer["ranks"]:
        return "".join([f"{NOTHING_YET}\n", *above])
    means = [f"{name} {number_text(value)}" for name, value in answer["values"].items()]
    below = [*([""] if means else []), *means]
    num_lines = len(answer["ranks"]) if size is None else size.lines - len(below) - len(above) - 1
    ranks = _most_wanted(answer["ranks"], num_lines)
    rows = _fitting(ranks, _names(answer), None if size is None else size.columns, has_host=num_hosts(answer) > 1)
    hidden = [int(rank) for rank in answer["ranks"] if rank not in ranks]
    more = [f"not shown: {fold_ranks(hidden)}, which work less"] if hidden else []
    return "\n".join([*_aligned(rows), *more, *below]) + "\n" + "".join(above)


def _most_wanted(ranks: dict[str, Any], num_lines: int) -> dict[str, Any]:
    """Return as many ranks as there are lines for, one of which then names the others."""
    if len(ranks) <= num_lines:
        return ranks

    def urgency(rank: str) -> tuple[bool, float]:
        return _is_odd(ranks[rank]), ranks[rank]["own_seconds"]

    wanted = set(sorted(ranks, key=urgency, reverse=True)[: max(1, num_lines - 1)])
    return {rank: pace for rank, pace in ranks.items() if rank in wanted}


def _is_odd(pace: dict[str, Any]) -> bool:
    return any(isinstance(value, str) for value in pace["values"].values())


def _names(answer: dict[str, Any]) -> list[str]:
    """Return the names of the values that get a column: first those that are not finite on some rank."""
    paces = answer["ranks"].values()
    names = dict.fromkeys(name for pace in paces for name in pace["values"])

    def is_finite(name: str) -> bool:
        return not any(isinstance(pace["values"].get(name), str) for pace in paces)

    return sorted(names, key=is_finite)[:MOST_VALUES]


def _fitting(
    ranks: dict[str, Any], names: Sequence[str], width: int | None, *, has_host: bool
) -> list[tuple[str, ...]]:
    """Return the rows, with as many columns of values as fit, but with one at least."""
    rows = [
        ("rank", *(["host"] if has_host else []), *_COLUMNS, *names),
        *(_row(rank, pace, names, has_host=has_host) for rank, pace in ranks.items()),
    ]
    if width is None or len(names) <= 1 or len(_aligned(rows)[0]) <= width:
        return rows
    return _fitting(ranks, names[:-1], width, has_host=has_host)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [_GAP.join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _row(rank: str, pace: dict[str, Any], names: Sequence[str], *, has_host: bool) -> tuple[str, ...]:
    parts, seconds = pace["parts"], pace["step_seconds"]
    compute = parts["forward"] + parts["backward"] + parts["optimizer"]
    rest = max(0.0, seconds - parts["data"] - compute - parts["exchange"])
    return (
        rank,
        *([pace["host"]] if has_host else []),
        f"{pace['steps']}",
        f"{1 / seconds:.1f}" if seconds else "",
        f"{seconds * 1e3:.1f} ms" if seconds else "",
        *(f"{share / seconds:.0%}" if seconds else "" for share in (parts["data"], compute, parts["exchange"], rest)),
        f"{pace['memory_bytes'] / 2**20:.0f} MiB",
        f"{pace['now']}, {pace['seconds_in_step']:.1f} s",
        *(number_text(pace["values"][name]) if name in pace["values"] else "" for name in names),
    )


TOP = Command(
    name="top",
    help="watch the pace of every rank of a running job",
    description="""\
Show how fast each rank of a job trains, what its time goes to, its memory, and the last values it logged, also those
of ranks on other machines. Below are the means of these values over all ranks.

Run it on any machine of the job. One that does not answer within 2 seconds is named, and its ranks are left out.

The ranks notice nothing. In a terminal it is redrawn every second, with keys: s for their stacks, q to quit. Without
a terminal it prints one line a minute.""",
    epilog="""\
examples:
  rankwise top                your only job that `rankwise run` has started here
  rankwise top --job 4711     the job whose launcher is process 4711
  rankwise top --once         print one table and exit
  rankwise top --json         for a program""",
    add_options=_add_top_options,
    execute=_run_top,
)


def _add_stacks_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--job", type=int, metavar="PID", help="process id of the launcher")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")


def _run_stacks(options: argparse.Namespace) -> int:
    """Ask the job, print what it answers, and return the exit code."""
    answer = control_socket.ask(control_socket.only_job(options.job, "stacks"), {"kind": "stacks"})
    sys.stdout.write(json.dumps(answer) + "\n" if options.json else answer["text"])
    return 0


STACKS = Command(
    name="stacks",
    help="show where every rank of a running job is",
    description="""\
Show what every rank of a job that runs on this machine is doing: its last collective, and its Python stack.

The job continues meanwhile. A rank that cannot answer is inspected from outside.""",
    epilog="""\
examples:
  rankwise stacks                your only job that `rankwise run` has started here
  rankwise stacks --job 4711     the job whose launcher is process 4711
  rankwise stacks --json         for a program""",
    add_options=_add_stacks_options,
    execute=_run_stacks,
)
