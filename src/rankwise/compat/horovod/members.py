# SPDX-License-Identifier: Apache-2.0
"""Who a process set is, and where this rank sits among the machines, as values. Used by queue and by what opens it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rankwise.collectives import Group


@dataclass(kw_only=True)
class Members:
    """Who a process set is."""

    ranks: tuple[int, ...]
    group: Group | None
    """``None`` for the world."""


@dataclass(kw_only=True)
class Seat:
    """Where this rank sits among the machines."""

    cross_rank: int
    cross_size: int
    is_homogeneous: bool
