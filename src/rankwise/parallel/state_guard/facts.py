# SPDX-License-Identifier: Apache-2.0
"""What else must be the same on all ranks in every step: named integers, which other rooms add.

The state of a random number generator, or how often something was called, becomes a fact by :func:`add_fact`; every
guard then compares it with its checksums, in every step, at no message more. Used by guard and diagnosis.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.exchange.protocol import Exchange

MASK = 2**63 - 1


class PutRight(Protocol):
    """Makes a fact the same on all ranks."""

    def __call__(self, ranks: Exchange, *, is_expected: bool) -> None:
        """Do it, with a warning unless it was expected. Called by: every rank that compares."""
        ...


@dataclass(frozen=True, slots=True)
class Repair:
    """How a fact is made the same again."""

    put_right: PutRight
    is_expected: Callable[[], bool]
    """Whether ranks differ in the step under way, as all of them know without comparing."""


@dataclass(frozen=True, slots=True)
class Fact:
    """An integer that must be the same on all ranks, whenever a backward begins to send gradients."""

    name: str
    """In words, as an error begins with it: ``The state of torch's random number generator``."""
    read: Callable[[], int | None]
    """Returns it; called in steps that compare settings, so it takes microseconds. ``None``: nothing to compare yet."""
    repair: Repair | str
    """What makes it the same on all ranks again, so that a difference is no error; or what the user is to do."""

    @property
    def number(self) -> int | None:
        """What it is now, in 63 bits."""
        value = self.read()
        return None if value is None else value & MASK


_facts: dict[str, Fact] = {}


def add_fact(name: str, read: Callable[[], int | None], repair: Repair | str) -> None:
    """Have ranks compare an integer with their settings, from the next step on, until :func:`forget_facts`.

    Called by: every rank, between the same two steps. A fact of the same name is replaced.

    Args:
        name: of the fact, in words: the beginning of the sentence that says that ranks differ.
        read: returns it; cheap, without waiting for a device or for other ranks. ``None``: nothing to compare yet.
        repair: what fixes a difference: what the user is to do, for the error; or how it is put right without one.
    """
    _facts[name] = Fact(name, read, repair)


def forget_facts() -> None:
    """Compare none any more. Called when the world is left."""
    _facts.clear()


def all_facts() -> list[Fact]:
    """Return the facts in the order of their names, which is the same on every rank."""
    return [_facts[name] for name in sorted(_facts)]
