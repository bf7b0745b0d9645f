# SPDX-License-Identifier: Apache-2.0
"""A measured step of a pipeline: a row per rank, a box per forward and backward, gaps where a rank waited."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.charts.shapes import Span
from rankwise.charts.units import duration

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

STYLES = {
    "forward": "forward",
    "backward": "backward",
    "backward of inputs": "exchange",
    "backward of weights": "optimizer",
}
"""Of each kind of box."""
ENGLISH = {"rank": "rank", "stage": "stage", "micro-batch": "micro-batch"}

Measured = tuple[int, str, int, int, float, float]
"""Rank, kind, stage, micro-batch, beginning and end in seconds, of one forward or backward."""


def schedule_rows(measured: Sequence[Measured], names: Mapping[str, str] = ENGLISH) -> list[tuple[str, list[Span]]]:
    """Return the row of each rank, with its label.

    Args:
        measured: of all ranks; at least one.
        names: what "rank", "stage" and "micro-batch" are called.
    """
    rows: list[list[Span]] = [[] for _ in range(1 + max(rank for rank, *_ in measured))]
    for rank, kind, stage, micro_batch, start, end in measured:
        told = f"{kind}, {names['stage']} {stage}, {names['micro-batch']} {micro_batch}: {duration(end - start)}"
        rows[rank].append(Span(STYLES[kind], start, end, str(micro_batch), told))
    return [(f"{names['rank']} {rank}", row) for rank, row in enumerate(rows)]


def schedule_legend(measured: Sequence[Measured]) -> list[tuple[str, str]]:
    """Return style and name of each kind of box that there is, in the order in which they are first met."""
    return [(STYLES[kind], kind) for kind in dict.fromkeys(kind for _, kind, *_ in measured)]
