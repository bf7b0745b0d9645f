# SPDX-License-Identifier: Apache-2.0
"""Opening one piece of shared memory in every rank of a host, or in none of the world."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.exchange.agreeing import gather_texts
from rankwise.exchange.mapping import Mapping

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.exchange.agreeing import Gathers

WHAT = "opening shared memory"


def open_together(
    exchange: Gathers, num_bytes: int, own_parts: Sequence[tuple[int, int]], first: int
) -> tuple[Mapping | None, dict[int, str]]:
    """Open one piece of memory per host, created by the first rank of each.

    Called by: every rank of ``exchange``.

    Args:
        exchange: carries the tickets.
        num_bytes: its size; the same on every rank of a host.
        own_parts: starts and lengths of what this rank writes much of.
        first: the rank that creates it on this host.

    Returns:
        The memory, or ``None`` on every rank, with the reasons of the ranks that could not open it.
    """
    mapping, reason, ticket = None, "", ""
    if exchange.rank == first:
        try:
            mapping = Mapping.create(num_bytes)
            ticket = mapping.ticket
        except OSError as error:
            reason = str(error)
    ticket = gather_texts(exchange, ticket, what=WHAT)[first]
    if ticket:
        try:
            if mapping is None:
                mapping = Mapping.open(ticket, num_bytes)
            for start, length in own_parts:
                mapping.reserve(start, length)
        except OSError as error:
            reason = str(error)
    texts = gather_texts(exchange, reason, what=WHAT)
    if mapping is not None:
        mapping.settle()
    reasons = {rank: text for rank, text in enumerate(texts) if text}
    return (None if reasons else mapping), reasons
