# SPDX-License-Identifier: Apache-2.0
"""The axes that ranks are laid out along, and their arithmetic. No torch."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from itertools import product
from typing import TYPE_CHECKING

from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping

NAMES = ("worker_groups", "pp", "dp_replicate", "dp_shard", "tp")
"""Outermost first: ranks that differ only in the last one are neighbors, and communicate most."""
DATA_AXES = ("worker_groups", "dp_replicate", "dp_shard")
"""Ranks that differ along one of these see different samples; all others see the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Axes:
    """The number of ranks along each axis. Their product is the world size."""

    worker_groups: int = 1
    """Worker groups that train independently and are averaged rarely; each has its part of the batch."""
    pp: int = 1
    """Stages of a pipeline: each rank holds some of the layers."""
    dp_replicate: int = 1
    """Copies of the model, each with its part of the batch."""
    dp_shard: int = 1
    """Shards of the parameters; each rank also has its part of the batch."""
    tp: int = 1
    """Shards of each layer."""

    def __str__(self) -> str:
        sizes = [f"{name}={size}" for name, size in asdict(self).items() if size > 1]
        return ", ".join(sizes) or "one rank"

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return math.prod(self._sizes())

    @property
    def data_world_size(self) -> int:
        """The number of parts a global batch is split into."""
        return self.worker_groups * self.data_ranks_per_group

    @property
    def data_ranks_per_group(self) -> int:
        """The number of parts of a global batch for each worker group."""
        return self.dp_replicate * self.dp_shard

    def size(self, name: str) -> int:
        """Return the number of ranks along an axis."""
        return self._sizes()[NAMES.index(name)]

    def coordinate(self, rank: int, name: str) -> int:
        """Return the coordinate of a rank along an axis."""
        return self._coordinates(rank)[NAMES.index(name)]

    def data_rank(self, rank: int) -> int:
        """Return which part of a global batch a rank takes, from 0 to ``data_world_size - 1``."""
        part = 0
        for name in DATA_AXES:
            part = part * self.size(name) + self.coordinate(rank, name)
        return part

    def groups_along(self, *names: str) -> list[list[int]]:
        """Return the ranks in groups that differ only along these axes, in rank order."""
        fixed = [index for index, name in enumerate(NAMES) if name not in names]
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            coordinates = self._coordinates(rank)
            groups.setdefault(tuple(coordinates[index] for index in fixed), []).append(rank)
        return list(groups.values())

    def ranks_along(self, rank: int, *names: str) -> list[int]:
        """Return the group of a rank among those of :meth:`groups_along`."""
        return next(group for group in self.groups_along(*names) if rank in group)

    def _sizes(self) -> tuple[int, ...]:
        return (self.worker_groups, self.pp, self.dp_replicate, self.dp_shard, self.tp)

    def _coordinates(self, rank: int) -> tuple[int, ...]:
        found: list[int] = []
        for size in reversed(self._sizes()):
            rank, coordinate = divmod(rank, size)
            found.append(coordinate)
        return tuple(reversed(found))


def axes_of(world_size: int, sizes: Mapping[str, int]) -> Axes:
    """Return the axes of these sizes.

    Args:
        world_size: their product.
        sizes: by name; one may be -1 to be inferred, and omitted ones are 1.

    Raises:
        ConfigurationError: their product is another number; the error names the nearest sizes that fit.
    """
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size != -1):
            raise ConfigurationError(
                f"The size of axis {name} must be an int >= 1, or -1, got {size!r}.",
                do="pass a number of ranks, or -1 to infer it from the world size",
            )
    known = math.prod(size for size in sizes.values() if size != -1)
    open_names = [name for name, size in sizes.items() if size == -1]
    if len(open_names) > 1:
        raise ConfigurationError(
            f"Both {' and '.join(open_names)} are -1: only one axis can be inferred.",
            do=f"pass the number of ranks along {open_names[0]}",
        )
    fits = world_size % known == 0 if open_names else known == world_size
    if not fits:
        raise ConfigurationError(
            f"{_words(sizes)} does not fit {world_size} {'rank' if world_size == 1 else 'ranks'}.",
            evidence=f"the product of the sizes is {known}{', without the inferred one' if open_names else ''}",
            do=f"pass {_words(nearest(world_size, sizes))}, or start {_fitting_world_size(world_size, known)} ranks",
        )
    return Axes(**{name: world_size // known if size == -1 else size for name, size in sizes.items()})


def nearest(world_size: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes closest to ``sizes`` whose product is ``world_size``, on the same axes."""
    names = [name for name, size in sizes.items() if size != 1] or ["dp_replicate"]
    divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]
    wanted = [sizes.get(name, 1) for name in names]

    def distance(candidate: tuple[int, ...]) -> float:
        return sum(abs(math.log(have / want)) for have, want in zip(candidate, wanted, strict=True) if want != -1)

    fitting = (candidate for candidate in product(divisors, repeat=len(names)) if math.prod(candidate) == world_size)
    return dict(zip(names, min(fitting, key=lambda candidate: (distance(candidate), candidate)), strict=True))


def _fitting_world_size(world_size: int, known: int) -> int:
    return max(1, round(world_size / known)) * known


def _words(sizes: Mapping[str, int]) -> str:
    return "mesh(" + ", ".join(f"{name}={size}" for name, size in sizes.items()) + ")"
