# SPDX-License-Identifier: Apache-2.0
"""Proportional memory of 4 ranks that read one 1 GB dataset through `rw.share`, against one copy of it.

Each rank counts its proportional set size (Pss, which divides a page among the processes that map it) before
sharing and after reading everything.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from measure import Row, show
from torch.utils.data import TensorDataset

import rankwise as rw
from rankwise.testing import run_ranks

if TYPE_CHECKING:
    from rankwise.world.facts import World

NUM_RANKS = 4
NUM_BYTES = 10**9
REACH = 1.15


def proportional_bytes() -> int:
    """Return this process's proportional set size."""
    for line in Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    message = "this kernel tells no Pss"
    raise RuntimeError(message)


def dataset_of(num_rows: int) -> TensorDataset:
    """Return ones of 1000 bytes a row."""
    return TensorDataset(torch.ones(num_rows, 1000, dtype=torch.uint8))


def read(num_rows: int) -> TensorDataset:
    """Share a dataset and read this rank's part through a loader, then all of it: every page is mapped."""
    dataset: TensorDataset = rw.share(lambda: dataset_of(num_rows))
    num_bytes = sum(x.numel() for (x,) in rw.DataLoader(dataset, global_batch_size=1000) if int(x.max()) == 1)
    if rw.all_reduce(num_bytes) != num_rows * 1000 or int(dataset.tensors[0].max()) != 1:
        message = "the ranks did not read what was shared"
        raise RuntimeError(message)
    return dataset


def read_everything(_: World) -> int:
    """Return by how many bytes this rank grew."""
    read(10_000)  # what the code itself needs
    rw.barrier()
    before = proportional_bytes()
    rw.barrier()
    dataset = read(NUM_BYTES // 1000)
    rw.barrier()
    grown = proportional_bytes() - before
    rw.barrier()
    del dataset
    return grown


if __name__ == "__main__":
    grown = sum(result.get() for result in run_ranks(read_everything, NUM_RANKS, timeout_seconds=300))
    show(
        [
            Row(
                f"memory of {NUM_RANKS} ranks reading one 1 GB dataset, against one copy",
                f"{grown / 1e9:.3f} GB",
                "1 GB",
                grown / NUM_BYTES,
                REACH,
            )
        ]
    )
