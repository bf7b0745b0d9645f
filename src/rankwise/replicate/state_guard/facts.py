# SPDX-License-Identifier: Apache-2.0
"""Named integers that ranks compare with their settings, such as the state of a random number generator.

Other rooms add them, and guards read them in the steps that compare.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

FACT_MASK = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Repair:
    """How a fact is made equal on all ranks again."""

    apply: Callable[..., None]
    """Makes it equal, given an exchange and the keyword ``is_expected``. Called by: every rank that compares."""
    is_expected: Callable[[], bool]
    """Returns whether ranks differ in the step under way, which all of them know without comparing."""


@dataclass(frozen=True, slots=True)
class SharedFact:
    """An integer that must be the same on all ranks; see :func:`add_fact`."""

    name: str
    read: Callable[[], int | None]
    repair: Repair | str

    def number(self) -> int | None:
        """Return its current value, in 63 bits; ``None``: nothing to compare yet."""
        value = self.read()
        return None if value is None else value & FACT_MASK


_facts: dict[str, SharedFact] = {}
"""In the order of their names, which is the same on every rank."""


def add_fact(name: str, read: Callable[[], int | None], repair: Repair | str) -> None:
    """Have ranks compare an integer with their settings, from the next step on, until :func:`forget_facts`.

    Called by: every rank, between the same two steps. A fact of the same name is replaced.

    Args:
        name: starts the sentence of an error: ``The state of torch's random number generator``.
        read: returns the integer within microseconds, without waiting for a device or for other ranks; ``None``: there
            is nothing to compare yet.
        repair: the user's fix for a difference, for the error; or a way to make it equal again without an error.
    """
    facts = {**_facts, name: SharedFact(name, read, repair)}
    _facts.clear()
    _facts.update(sorted(facts.items()))


def forget_facts() -> None:
    """Stop comparing facts. Called when the world is left."""
    _facts.clear()


def all_facts() -> list[SharedFact]:
    """Return the facts in the order of their names, which is the same on every rank."""
    return list(_facts.values())
