# SPDX-License-Identifier: Apache-2.0
"""How sums over Python numbers were read in earlier steps: a number that is once a constant is no size later on."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.errors import ConfigurationError
    from rankwise.parallel.loss.verdict import GlobalLoss, GlobalTerm, Reading
    from rankwise.places import Place


class Readings:
    """The readings of one model's losses, step by step; the same on every rank that reads them."""

    def __init__(self, ambiguous: Callable[[GlobalTerm, Place | None], ConfigurationError]) -> None:
        """Remember nothing yet.

        Args:
            ambiguous: returns the error for a term of the loss at a line that can be read in two ways.
        """
        self._ambiguous = ambiguous
        self._known: dict[tuple[int, Place | None, int, bool], Reading] = {}
        """By the loss, its line, the number of the term and if it is divided."""

    def check(self, combined: GlobalLoss, place: Place | None) -> None:
        """Raise if a sum over a number was read otherwise in an earlier step, or cannot be read at all.

        Args:
            combined: the losses of all ranks.
            place: the line of the backward.
        """
        for number, term in enumerate(combined.terms):
            if term.reading == "mean":
                continue
            key = _key(combined, number, place)
            known = self._known.get(key)
            # A constant may happen to be the number of samples of every rank.
            fitting = {"both", known} | ({"share"} if known == "constant" and term.has_one_divisor else set())
            is_contradicted = known is not None and term.reading not in fitting
            if is_contradicted or (known is None and term.reading == "both"):
                raise self._ambiguous(term, place)
            if known is None:
                self._known[key] = term.reading

    def of(self, combined: GlobalLoss, number: int, place: Place | None) -> Reading:
        """Return how a term is read, by earlier steps before this one."""
        return self._known.get(_key(combined, number, place), combined.terms[number].reading)


def _key(combined: GlobalLoss, number: int, place: Place | None) -> tuple[int, Place | None, int, bool]:
    return combined.code, place, number, combined.terms[number].divisor > 0
