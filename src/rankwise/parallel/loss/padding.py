# SPDX-License-Identifier: Apache-2.0
"""Whether a mean counts padding, of which the ranks have unequal amounts. Values only.

One rank would pad all samples of the batch to one length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.parallel.loss.nodes import ForwardCall
    from rankwise.parallel.loss.terms import Term


@dataclass(frozen=True, slots=True)
class Rows:
    """The samples of a rank, where a plain mean is over all elements of each."""

    loss: int
    """Elements of the loss per sample."""
    given: int
    """Elements per sample of what the model was given."""


def rows_of(terms: Sequence[Term], call: ForwardCall | None, num_samples: int | None) -> Rows | None:
    """Return what is known of the rows of a loss; ``None`` where its rows are not known to be samples.

    Args:
        terms: of the loss.
        call: of the model.
        num_samples: that a loader gave this rank; ``None`` where none did. By it batches whose first dim is the
            sequence are known.
    """
    if call is None or not num_samples or len(call.sizes) < 2 or call.sizes[0] != num_samples:  # noqa: PLR2004
        return None
    row = next((term.row for term in terms if term.row and term.num_rows == num_samples), 0)
    given = 1
    for size in call.sizes[1:]:
        given *= size
    return Rows(row, given) if row else None


def report_rows(rows: Rows | None) -> list[float]:
    """Return the numbers by which ranks compare their rows."""
    if rows is None:
        return [0.0] * 5
    loss, given = float(rows.loss), float(rows.given)
    return [1.0, loss, loss**2, given, given**2]
