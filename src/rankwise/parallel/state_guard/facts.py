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

MASK = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Fact:
    """An integer that must be the same on all ranks, whenever a backward begins to send gradients."""

    name: str
    """In words, as an error begins with it: ``The state of torch's random number generator``."""
    read: Callable[[], int]
    """Returns it; called in every step of every replicated model, so it takes a microsecond or so."""
    do: str
    """What mends a difference."""

    @property
    def number(self) -> int:
        """What it is now, in 63 bits."""
        return self.read() & MASK


_facts: dict[str, Fact] = {}


def add_fact(name: str, read: Callable[[], int], *, do: str) -> None:
    """Have ranks compare an integer in every step, from the next one on, until :func:`forget_facts`.

    Called by: every rank, between the same two steps. A fact of the same name is replaced.

    Args:
        name: of the fact, in words: the beginning of the sentence that says that ranks differ.
        read: returns it; cheap, without waiting for a device or for other ranks.
        do: what mends a difference, for the error.
    """
    _facts[name] = Fact(name, read, do)


def forget_facts() -> None:
    """Compare none any more. Called when the world is left."""
    _facts.clear()


def all_facts() -> list[Fact]:
    """Return the facts in the order of their names, which is the same on every rank."""
    return [_facts[name] for name in sorted(_facts)]
