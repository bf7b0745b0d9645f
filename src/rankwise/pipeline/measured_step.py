# SPDX-License-Identifier: Apache-2.0
"""A measured step of a pipeline: how long it took, how much of that was waiting, and its picture."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

from rankwise.charts import duration, picture_of, schedule_legend, schedule_rows, spans
from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path

    from rankwise.charts import Measured
    from rankwise.pipeline.executor import Span


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A measured step."""

    schedule: str
    num_stages: int
    spans: tuple[Span, ...]

    @property
    def seconds(self) -> float:
        """From the meeting of the ranks to the end of the last one."""
        return max((span.end for span in self.spans), default=0.0)

    @property
    def num_ranks(self) -> int:
        """How many ranks took part."""
        return 1 + max((span.rank for span in self.spans), default=-1)

    @property
    def bubble(self) -> float:
        """The share of the ranks' time in which they computed nothing."""
        whole = self.seconds * self.num_ranks
        return 1.0 - sum(span.end - span.start for span in self.spans) / whole if whole else 0.0

    @property
    def title(self) -> str:
        """What was measured, in one line."""
        num_micro_batches = 1 + max((span.micro_batch for span in self.spans), default=-1)
        return (
            f"{self.schedule}: {self.num_stages} stages on {self.num_ranks} ranks, {num_micro_batches} micro-batches, "
            f"{duration(self.seconds)}, bubble {self.bubble:.0%}"
        )

    @property
    def rows(self) -> list[Measured]:
        """The spans as they are drawn and recorded."""
        return [astuple(span) for span in self.spans]


def write_picture(step: MeasuredStep, path: Path) -> None:
    """Write the picture of a step as SVG.

    Raises:
        ConfigurationError: ``path`` does not end in ``.svg``, or its folder does not exist.
    """
    if path.suffix.lower() != ".svg":
        raise ConfigurationError(
            f"draw() writes .svg, not {str(path)!r}.",
            do='pass "schedule.svg"; for a page, rankwise run --report DIR and rankwise show DIR',
        )
    if not path.parent.is_dir():
        raise ConfigurationError(f"The folder {str(path.parent)!r} of draw() does not exist.", do="create it first")
    chart = spans(schedule_rows(step.rows), step.title, duration)
    path.write_text(picture_of(chart, step.title, schedule_legend(step.rows)), encoding="utf-8")
