# SPDX-License-Identifier: Apache-2.0
"""Typed collectives: one type in, the same type out, trees of tensors too.

Tensors, arrays of NumPy and of what has ``__dlpack__``, and numbers, alone or in lists, tuples and dicts. Alone, in a
world or a group of one, each is the identity. Results never alias what was given, and have no gradients.
"""

from rankwise.collectives.averaging import mean
from rankwise.collectives.group import Group, exchange_of
from rankwise.collectives.moving import all_gather, all_gather_uneven, all_to_all, broadcast
from rankwise.collectives.new_group import new_group
from rankwise.collectives.objects import all_gather_object, barrier, broadcast_object, gather_json
from rankwise.collectives.reducing import all_reduce, reduce_scatter

__all__ = [
    "Group",
    "all_gather",
    "all_gather_object",
    "all_gather_uneven",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_object",
    "exchange_of",
    "gather_json",
    "mean",
    "new_group",
    "reduce_scatter",
]
