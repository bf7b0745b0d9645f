# SPDX-License-Identifier: Apache-2.0
"""What went where, and why: the report of a placed model. Values only. Imported by place."""

from __future__ import annotations

from dataclasses import dataclass

from rankwise.parallel.place.plan import in_words


@dataclass(frozen=True, slots=True)
class PlacedPart:
    """Where one part of a model is."""

    module: str
    """The block's name, or that of a parameter of an open module."""
    device: str
    num_bytes: int
    """Parameters and buffers, tied ones counted once."""
    dtypes: tuple[str, ...]
    """Kinds of numbers that its parameters and buffers are kept in, that of the most bytes first; ``int8`` with
    ``place(int8=True)``, where ``weight.dtype`` says what the layer calculates in."""
    runs_on: str
    """The device that executes it; its weights are fetched to it where that is another one."""
    why: str


@dataclass(frozen=True, slots=True)
class Placement:
    """Where all parts of a model are. As text, a table."""

    parts: tuple[PlacedPart, ...]
    is_ahead: bool
    """Whether the next part is fetched while one runs."""

    @property
    def bytes_on(self) -> dict[str, int]:
        """Bytes at rest per device, in the order of the table."""
        total: dict[str, int] = {}
        for part in self.parts:
            total[part.device] = total.get(part.device, 0) + part.num_bytes
        return total

    def __str__(self) -> str:
        head = ("module", "device", "bytes", "numbers", "runs on", "why")
        rows = [
            (
                part.module or "(the model)",
                part.device,
                in_words(part.num_bytes),
                ", ".join(part.dtypes),
                part.runs_on,
                part.why,
            )
            for part in self.parts
        ]
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
                 for row in (head, *rows)]  # fmt: skip
        lines += ["total  " + ", ".join(f"{device}: {in_words(size)}" for device, size in self.bytes_on.items())]
        if any(part.device != part.runs_on for part in self.parts):
            lines.append("fetched to where it runs: one part at a time" + (", and the next" if self.is_ahead else ""))
        return "\n".join(lines)
