# SPDX-License-Identifier: Apache-2.0
"""How these tests run something on ranks: over each exchange, and on one rank, to compare with."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from rankwise import testing

RunRanks = Callable[..., list[testing.RankResult]]
"""``rankwise.testing.run_ranks`` over one exchange: what the fixture ``run_ranks`` gives."""


@cache
def one_rank(fn: Callable[..., Any], *args: object) -> Any:
    """Return what one rank comes to. Kept, since every exchange is compared with the same."""
    return testing.run_ranks(fn, 1, *args)[0].get()
