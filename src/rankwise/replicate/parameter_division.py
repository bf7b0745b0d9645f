# SPDX-License-Identifier: Apache-2.0
"""Which parameters share a bucket, and which belong to which owner: lists of their numbers.

Values in, values out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.torch_private.dtensor import own_part

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


def plan(
    parameters: Sequence[torch.Tensor], order: Sequence[int], first_bytes: int, limit_bytes: int
) -> list[list[int]]:
    """Return buckets of parameter numbers, filled in ``order``.

    Parameters of one dtype and device share buckets. A bucket closes when it reaches its limit; the first
    closes early, so that reducing starts early.

    Args:
        parameters: all of them.
        order: their numbers, in the order in which their gradients arrive.
        first_bytes: limit of the first bucket of each kind.
        limit_bytes: limit of the others.
    """
    closed: list[list[int]] = []
    open_of: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
    limit_of: dict[tuple[torch.dtype, torch.device], int] = {}
    for number in order:
        parameter = parameters[number]
        kind = (parameter.dtype, parameter.device)
        members, size_bytes = open_of.get(kind, ([], 0))
        members.append(number)
        size_bytes += own_part(parameter).nbytes
        if size_bytes >= limit_of.get(kind, first_bytes):
            closed.append(members)
            limit_of[kind] = limit_bytes
            members, size_bytes = [], 0
        open_of[kind] = (members, size_bytes)
    return closed + [members for members, _ in open_of.values() if members]


def divide_by_size(sizes: Sequence[int], num_owners: int) -> list[list[int]]:
    """Return the numbers of the parameters that each owner gets: whole ones, about equally many bytes each.

    The largest go first, each to the owner with the least; one that is larger than all others together is not split.
    """
    loads = [0] * num_owners
    owned: list[list[int]] = [[] for _ in loads]
    for number in sorted(range(len(sizes)), key=lambda one: (-sizes[one], one)):
        owner = loads.index(min(loads))
        loads[owner] += sizes[number]
        owned[owner].append(number)
    return [sorted(numbers) for numbers in owned]
