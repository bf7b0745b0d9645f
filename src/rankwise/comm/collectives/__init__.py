# SPDX-License-Identifier: Apache-2.0
"""Typed collectives: one type in, the same type out, trees of tensors too.

Tensors, arrays of NumPy and of what has ``__dlpack__``, and numbers, alone or in lists, tuples and dicts. In a
world or a group of one, each is the identity. Results never alias the arguments, and have no gradients.
"""

from rankwise.comm.collectives.data_movement import (
    all_gather,
    all_gather_uneven,
    all_to_all,
    broadcast,
    whole_batch,
)
from rankwise.comm.collectives.group import gather_json, new_group
from rankwise.comm.collectives.objects import all_gather_object, barrier, broadcast_object
from rankwise.comm.collectives.reductions import all_reduce, mean, reduce_scatter
from rankwise.comm.session import Group, exchange_of

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
    "whole_batch",
]
