# SPDX-License-Identifier: Apache-2.0
"""What else must be the same on all ranks in every step: named integers, which other rooms add.

The state of a random number generator, or how often something was called, becomes a fact by :func:`add_fact`; every
guard then compares it with its checksums, in every step, at no message more. Used by guard and diagnosis.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.exchange.protocol import Exchange

MASK = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Fact:
    """An integer that must be the same on all ranks, whenever a backward begins to send gradients."""

    name: str
    """In words, as an error begins with it: ``The state of torch's random number generator``."""
    read: Callable[[], int | None]
    """Returns it; called in steps that compare settings, so it takes microseconds. ``None``: nothing to compare yet."""
    do: str
    """What fixes a difference."""
    put_right: Callable[[Exchange], None] | None = None
    """Makes it the same on all ranks, where that is possible, and warns: a difference is then no error."""

    @property
    def number(self) -> int | None:
        """What it is now, in 63 bits."""
        value = self.read()
        return None if value is None else value & MASK


_facts: dict[str, Fact] = {}


def add_fact(
    name: str, read: Callable[[], int | None], *, do: str, put_right: Callable[[Exchange], None] | None = None
) -> None:
    """Have ranks compare an integer with their settings, from the next step on, until :func:`forget_facts`.

    Called by: every rank, between the same two steps. A fact of the same name is replaced.

    Args:
        name: of the fact, in words: the beginning of the sentence that says that ranks differ.
        read: returns it; cheap, without waiting for a device or for other ranks.
        do: what fixes a difference, for the error.
        put_right: makes it the same on all ranks instead, and warns; called by every rank that compares.
    """
    _facts[name] = Fact(name, read, do, put_right)


def forget_facts() -> None:
    """Compare none any more. Called when the world is left."""
    _facts.clear()


def all_facts() -> list[Fact]:
    """Return the facts in the order of their names, which is the same on every rank."""
    return [_facts[name] for name in sorted(_facts)]
