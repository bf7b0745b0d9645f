# SPDX-License-Identifier: Apache-2.0
"""Values that a script logs, as means over the samples of all ranks: into the record of the run, and TensorBoard.

Ranks add up what they have logged once per second at most, in one collective, so that logging at every step costs next
to nothing. When they do so depends only on what they have added up before: it is the same on all.
"""

from __future__ import annotations

import math
import time
import zlib
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, SupportsFloat

import torch

from rankwise import meter
from rankwise.comm.session import agreed, current
from rankwise.errors import CollectiveMismatch, ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path

    from rankwise.comm.session import Session

LOGGED_SECONDS = 1.0
"""How often ranks add up what they have logged."""
MOST_PENDING = 512
"""How many values wait at most."""
LONGEST_EVIDENCE = 200
DIGITS = 7


def log_value(name: str, value: SupportsFloat, weight: float | None = None) -> None:
    """Log a value of this step, such as the loss: its mean over the samples of all ranks.

    Called by: every rank, in the same order. It seldom communicates, and does not wait for an accelerator before then.

    ``rankwise report`` draws the values that were logged, and ``rankwise top`` shows the last ones, also those of each
    rank. If TensorBoard is installed, and the run was given a folder for its report, the means are also written to
    ``tensorboard`` in there.

    Args:
        name: what the value is: ``"loss"``.
        value: a number or a tensor of one element: the mean over this rank's samples.
        weight: how many samples it is the mean over; by default, as many as this rank has of the current batch of a
            :class:`rankwise.DataLoader`, else 1.

    Raises:
        NotJoined: before :func:`rankwise.join`.
        ConfigurationError: ``name`` is no text, ``value`` is not one number, or ``weight`` is negative or not finite.
        CollectiveMismatch: ranks have logged values under different names.
        PeerFailed, PeerMissing: as :func:`rankwise.all_reduce`.
    """
    session = current()
    if not isinstance(name, str):
        raise ConfigurationError(f"log_value() takes a name, got {name!r}.", do='rankwise.log_value("loss", loss)')
    if weight is None:
        weight = 1.0 if session.batches.current is None else float(session.batches.current.num)
    if not (math.isfinite(weight) and weight >= 0):
        raise ConfigurationError(
            f"The weight of log_value() must be at least zero and finite, got {weight}.",
            do="pass the number of samples that the value is the mean over",
        )
    session.once(_LoggedValues).add(name, _number(value), weight)


def _number(value: object) -> torch.Tensor | float:
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        return value.detach().clone()
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigurationError(
            f"log_value() takes a number or a tensor of one element, got {type(value).__name__}.",
            evidence=str(error),
            do="reduce it to one number first: loss.mean()",
        ) from None


class _LoggedValues:
    """What this rank has logged and not yet added up with the others."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._pending: list[tuple[str, int, torch.Tensor | float, float]] = []
        self._patience = 1
        """How many values wait until they are added up; the same on every rank."""
        self._since = time.monotonic()
        self._own: dict[str, float] = {}
        """The last values of this rank that were added up."""
        self._writer: Any = None
        session.on_leave(self._flush)

    def add(self, name: str, value: torch.Tensor | float, weight: float) -> None:
        """Keep a value of the step under way, and add up all that were kept if that is due."""
        self._pending.append((name, meter.current.step, value, weight))
        if len(self._pending) >= self._patience:
            self._flush()

    def _flush(self) -> None:
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        values = [float(value) if weight else 0.0 for _, _, value, weight in pending]
        now = time.monotonic()
        rows = [[value * weight, weight] for value, (*_, weight) in zip(values, pending, strict=True)]
        spent = (now - self._since) / len(pending) if self._session.world.rank == 0 else 0.0
        order = float(zlib.crc32("\0".join(name for name, *_ in pending).encode()) & 0xFFFF)
        sums = torch.tensor([*rows, [order, order * order], [spent, 0.0]], dtype=torch.float64)
        names = ", ".join(dict.fromkeys(name for name, *_ in pending))
        what = f"log_value of {names}: {len(pending)} {'value' if len(pending) == 1 else 'values'}"
        exchange = agreed(what, None)
        if exchange is not None:
            sums = exchange.all_reduce(sums, what=what)
        *totals, (orders, squares), (spent, _) = sums.tolist()
        # Only equal numbers have this sum of squares.
        if exchange is not None and orders * orders != exchange.world_size * squares:
            raise CollectiveMismatch(
                "The ranks have logged values in different orders.",
                evidence=f"this rank: {', '.join(name for name, *_ in pending)[:LONGEST_EVIDENCE]}",
                do="call log_value() with the same names in the same order on every rank",
            )
        self._patience = max(1, min(MOST_PENDING, 2 * self._patience, int(LOGGED_SECONDS / max(spent, 1e-9))))
        self._since = time.monotonic()
        self._own |= {name: value for value, (name, *_, weight) in zip(values, pending, strict=True) if weight}
        self._show(
            {name: total / weight for (name, *_), (total, weight) in zip(pending, totals, strict=True) if weight}
        )
        if self._session.world.rank == 0:
            means = [total / weight if weight else math.nan for total, weight in totals]
            self._write([(name, step, mean) for (name, step, *_), mean in zip(pending, means, strict=True)])

    def _show(self, means: dict[str, float]) -> None:
        """Have ``rankwise top`` show the last means, and this rank's own values next to them."""
        meter.current.show_values({name: (self._own.get(name), mean) for name, mean in means.items()})

    def _write(self, values: list[tuple[str, int, float]]) -> None:
        for name in dict.fromkeys(name for name, *_ in values):
            own = [(step, mean) for one, step, mean in values if one == name]
            steps = [step for step, _ in own]
            meter.current.note("values", name=name, steps=steps, values=[_shortened(mean) for _, mean in own])
        writer = self._tensorboard(meter.current.folder)
        if writer is not None:
            for name, step, mean in values:
                writer.add_scalar(name, mean, step)
            writer.flush()

    def _tensorboard(self, folder: Path | None) -> Any:  # a class of a package that may not be there
        if self._writer is None and folder is not None and find_spec("tensorboard") is not None:
            self._writer = import_module("torch.utils.tensorboard").SummaryWriter(str(folder / "tensorboard"))
            self._session.at_end(self._writer.close)
        return self._writer


def _shortened(value: float) -> float | None:
    """Return a value with as many digits as a chart shows; JSON has no NaN."""
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
