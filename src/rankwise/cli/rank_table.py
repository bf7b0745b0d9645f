# SPDX-License-Identifier: Apache-2.0
"""The table of ``rankwise top``: a line per rank, with the values that it logged itself, and the means of all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rankwise.errors import fold_ranks
from rankwise.launch.inspect.steps import num_hosts, number_text, unanswered_line

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

NOTHING_YET = "no rank has completed a step yet"
MOST_VALUES = 3
"""How many logged values have a column."""
_COLUMNS = ("steps", "steps/s", "step", "data", "compute", "exchange", "rest", "memory", "now")
_GAP = "  "


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
