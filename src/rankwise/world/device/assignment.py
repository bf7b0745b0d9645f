# SPDX-License-Identifier: Apache-2.0
"""Which of the devices that a rank sees is its own, from what every rank of its host sees. Pure: values in, values out.

A launcher may show every rank all devices (torchrun), each its own (``srun --gpus-per-task=1``, masks) or some. The
numbers of devices start at 0 in every process, so only names that hold for the whole machine can be compared.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankwise.errors import ConfigurationError, fold_ranks, fold_values
from rankwise.world.device.kinds import kind_named

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

START_FEWER = "start at most one rank per {title}, or pass join(device='cpu')"
"""The fix where there are more ranks than devices."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sight:
    """What one rank sees of the devices of its host; none if it computes on the CPU."""

    kind: str = ""
    """Torch's name for their type."""
    devices: Sequence[str] = ()
    """A name for each that is the same in every process of the machine, in the order of their numbers here."""
    local_rank: int | None = None
    """Its local rank, if its launcher sets one."""
    requested: int | None = None
    """The number of the device that its script requests; ``None`` leaves the choice to rankwise."""


def index_of(rank: int, on_host: Mapping[int, Sight]) -> int:
    """Return the number of the device of a rank among those that it sees. It may see fewer.

    Ranks that see the same devices share them in the order of their local ranks. A rank that sees devices which no
    other rank sees uses the first: its launcher has selected them for it.

    Args:
        rank: its number in the world.
        on_host: what the ranks of its host see, by rank; it is one of them.
    """
    own = on_host[rank]
    if own.requested is not None:
        return own.requested
    order = sorted((sight.local_rank or 0, other) for other, sight in on_host.items() if sight.devices == own.devices)
    return [other for _, other in order].index(rank)


def refuse_unequipped(hostname: str, on_host: Mapping[int, Sight], *, may_share: bool) -> None:
    """Raise if a rank of a host has no device, or the one of another rank.

    Args:
        hostname: the host, for the error.
        on_host: as in :func:`index_of`.
        may_share: whether scripts may request the same device for several ranks.

    Raises:
        ConfigurationError: names the ranks.
    """
    users: dict[str, list[int]] = defaultdict(list)
    for rank, sight in on_host.items():
        index = index_of(rank, on_host)
        if index < len(sight.devices):
            users[sight.devices[index]].append(rank)
        elif sight.devices and sight.requested is None:
            sharing = [other for other in on_host.values() if other.devices == sight.devices]
            title, count = kind_named(sight.kind).title, len(sight.devices)
            raise ConfigurationError(
                f"Rank {rank} has no {title}: {len(sharing)} ranks on {hostname} share {count} {title}"
                f"{'s' * (count > 1)}.",
                do=START_FEWER.format(title=title),
            )
    for name, ranks in users.items():
        if len(ranks) > 1 and not may_share:
            title = kind_named(on_host[ranks[0]].kind).title
            raise ConfigurationError(
                f"{fold_ranks(ranks).capitalize()} on {hostname} would use the same {title}: {name}.",
                evidence=fold_values({rank: f"sees {', '.join(on_host[rank].devices)}" for rank in ranks}),
                do=f"give each rank a {title} of its own (srun --gpus-per-task=1), or pass join(backend='gloo')",
            )
