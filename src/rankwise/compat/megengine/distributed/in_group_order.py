# SPDX-License-Identifier: Apache-2.0
"""rankwise's collectives in the order of a MegEngine group, along any axis, without gradients.

A group of rankwise counts its ranks upwards; MegEngine's has them as they were given. Imported by ``functional``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rankwise import collectives

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.compat.megengine.distributed.groups import Group


def gathered(data: torch.Tensor, group: Group) -> list[torch.Tensor]:
    """Return the tensors of all ranks, in the group's order."""
    parts = collectives.all_gather(data, group=group.group)
    return [parts[place] for place in group.places]


def scattered_sum(data: torch.Tensor, group: Group, axis: int) -> torch.Tensor:
    """Return this rank's part of the sum over ranks, divided along ``axis``."""
    parts = _upwards(data.tensor_split(group.size, axis), group)
    rows = torch.cat([part.movedim(axis, 0) for part in parts])
    return collectives.reduce_scatter(rows, group=group.group).movedim(0, axis)


def exchanged(data: torch.Tensor, group: Group, split_axis: int, concat_axis: int) -> torch.Tensor:
    """Return what every rank has for this one, put together along ``concat_axis``."""
    return torch.cat(_to_each(data.tensor_split(group.size, split_axis), group), concat_axis)


def gathered_at_root(data: torch.Tensor, group: Group, axis: int) -> torch.Tensor:
    """Return the tensors of all ranks put together on the root; elsewhere something of that shape."""
    nothing = data.new_empty(0)
    came = _to_each([data, *[nothing] * (group.size - 1)], group)
    if group.rank == 0:
        return torch.cat(came, axis)
    shape = list(data.shape)
    shape[axis] *= group.size
    return data.new_zeros(()).expand(shape)


def scattered_from_root(data: torch.Tensor, group: Group, axis: int) -> torch.Tensor:
    """Return this rank's part of the root's tensor."""
    nothing = data.new_empty(0)
    parts = data.tensor_split(group.size, axis) if group.rank == 0 else [nothing] * group.size
    return _to_each(parts, group)[0]


def _to_each(parts: Sequence[torch.Tensor], group: Group) -> list[torch.Tensor]:
    """Send each rank a part, and return what came from each, both in the group's order."""
    came = collectives.all_to_all(_upwards(parts, group), group=group.group)
    return [came[place] for place in group.places]


def _upwards(parts: Sequence[torch.Tensor], group: Group) -> list[torch.Tensor]:
    """Return parts in the group's order in the order of the ranks' numbers."""
    return [part for _, part in sorted(zip(group.proc_ranks, parts, strict=True), key=lambda pair: pair[0])]
