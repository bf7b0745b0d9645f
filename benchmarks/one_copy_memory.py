# SPDX-License-Identifier: Apache-2.0
"""What 4 ranks of a host need for parameters, what undoes a step, and the state of AdamW, against one copy of both.

The figure is the proportional share (Pss) of the memory files that hold them, summed over the ranks: a page that k
ranks have mapped counts 1/k on each.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from measure import Row, show
from torch import nn

import rankwise as rw
from rankwise.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rankwise.world.facts import World

NUM_RANKS = 4
WIDTH = 1024
NUM_LAYERS = 12
NUM_STEPS = 5
REACH = 1.37
"""Four copies instead of three: the parameters twice, for the record that undoes a step."""


def share(addresses: Iterable[int]) -> int:
    """Return this process's share, in bytes, of the files that are mapped at some addresses."""
    shares: dict[str, int] = {}
    places: dict[str, list[tuple[int, int]]] = {}
    inode = ""
    for line in Path("/proc/self/smaps").read_text(encoding="ascii").splitlines():
        name, *values = line.split()
        if not name.endswith(":"):
            low, high = (int(place, 16) for place in name.split("-"))
            inode = values[3]
            places.setdefault(inode, []).append((low, high))
        elif name == "Pss:":
            shares[inode] = shares.get(inode, 0) + int(values[0]) * 1024
    wanted = [one for one, parts in places.items() if any(low <= a < high for a in addresses for low, high in parts)]
    return sum(shares[one] for one in wanted)


def train(world: World) -> tuple[int, int]:
    """Return this rank's share after some steps, and the bytes of one copy."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(NUM_LAYERS)])
    rw.replicate(model, one_copy_per_host=True)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        torch.manual_seed(world.world_size * step + world.rank)
        model(torch.randn(4, WIDTH)).square().mean().backward()
        optimizer.step()
    held = list(model.parameters())
    for state in optimizer.state.values():
        held += [value for value in state.values() if isinstance(value, torch.Tensor)]
    # Every page is read, so that it counts.
    for one in held:
        one.sum().item()
    rw.barrier()
    found = share([one.data_ptr() for one in held])
    rw.barrier()
    return found, sum(one.nbytes for one in held)


def main() -> None:
    results = [result.get() for result in run_ranks(train, NUM_RANKS, timeout_seconds=300)]
    found, one_copy = sum(one for one, _ in results), results[0][1]
    mega = 2**20
    show(
        [
            Row(
                f"memory of parameters, their record and AdamW's state, {NUM_RANKS} ranks, against one copy",
                f"{found / mega:.0f} MiB",
                f"{one_copy / mega:.0f} MiB",
                found / one_copy,
                REACH,
            )
        ]
    )


if __name__ == "__main__":
    main()
