# SPDX-License-Identifier: Apache-2.0
"""A training script in which one rank is slow on purpose: ``train.py KIND RANK [FACTOR]``, so many times as slow.

Rank zero prints when each step begins, by its own clock.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import tempfile
import time

import torch

import rankwise as rw

NUM_STEPS = 40
KIND, SLOW = sys.argv[1], int(sys.argv[2])
FACTOR = int(sys.argv[3]) if len(sys.argv) > 3 else 1
PAUSES = """
import os, time
rank = os.getppid()
while os.getppid() == rank:
    os.kill(rank, 19)
    time.sleep(0.02)
    os.kill(rank, 18)
    time.sleep(0.01)
"""


class Samples(torch.utils.data.Dataset):
    """Reading a sample may take a while."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 480

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(self.seconds)
        return torch.full((64,), index / 480), torch.tensor(index % 10)


class DroppedPages:
    """Pages of a file that are dropped from memory: to read one again is a major fault, as for one that was swapped."""

    def __init__(self, num: int = 256) -> None:
        self.file = tempfile.TemporaryFile()  # noqa: SIM115 - read as long as the process runs
        self.file.write(os.urandom(num * mmap.PAGESIZE))
        self.file.flush()
        os.fsync(self.file.fileno())
        self.memory = mmap.mmap(self.file.fileno(), 0, prot=mmap.PROT_READ)
        self.memory.madvise(mmap.MADV_RANDOM)

    def read(self) -> None:
        self.memory.madvise(mmap.MADV_DONTNEED)
        os.posix_fadvise(self.file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        for page in range(0, len(self.memory), mmap.PAGESIZE):
            self.memory[page]


class Net(torch.nn.Module):
    """Calls ``before`` in each forward pass."""

    def __init__(self, width: int, before: object) -> None:
        super().__init__()
        self.before = before
        # An even number of layers of one size: every rank owns as much.
        layers = [layer for _ in range(4) for layer in (torch.nn.Linear(width, width), torch.nn.ReLU())]
        self.body = torch.nn.Sequential(torch.nn.Linear(64, width), *layers, torch.nn.Linear(width, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.before is not None:
            self.before()
        return self.body(x)


def compute() -> None:
    until = time.process_time() + 0.02
    while time.process_time() < until:
        pass


def slow_down(rank: int) -> tuple[object, subprocess.Popen[bytes] | None]:
    """Make this rank slow; return what its model calls, and a process to end."""
    if KIND == "shared":
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[0] if rank == SLOW else cores[-1]})
    if rank != SLOW:
        return None, None
    if KIND == "shared":
        return None, subprocess.Popen([sys.executable, "-c", "while True: pass"])
    if KIND == "paused":
        return None, subprocess.Popen([sys.executable, "-c", PAUSES])
    if KIND == "disk":
        synced = os.fsync

        def fsync(descriptor: int) -> None:
            time.sleep(0.1 * FACTOR)
            synced(descriptor)

        os.fsync = fsync
    return {"compute": compute, "swap": DroppedPages().read}.get(KIND), None


def main() -> None:
    world = rw.join()
    torch.manual_seed(0)
    is_slow = world.rank == SLOW
    before, helper = slow_down(world.rank)
    # Where the processor is taken away, it must mostly be while it is used.
    model = rw.replicate(Net(1024 if KIND in {"shared", "paused"} else 256, before))
    optimizer = torch.optim.AdamW(model.parameters())
    if KIND == "uneven":
        rows = torch.randn(10, 1024 if is_slow else 64, 64)
        loader = torch.utils.data.DataLoader([(x, torch.zeros(len(x)).long()) for x in rows], batch_size=None)
    else:
        samples = Samples(0.002 * FACTOR if KIND == "data" and is_slow else 0.0)
        loader = rw.DataLoader(samples, global_batch_size=8 * world.world_size, shuffle=True)
    batches = iter(())
    begun = []
    for step in range(1, NUM_STEPS + 1):
        begun.append(time.monotonic())
        batch = next(batches, None)
        if batch is None:
            batches = iter(loader)
            batch = next(batches)
        if KIND == "script" and is_slow:
            time.sleep(0.01 * FACTOR)
        loss = torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
        rw.log_value("loss", loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if KIND == "disk" and step % 10 == 0:
            rw.save("checkpoint", model=model)
    if world.rank == 0:
        print("steps begin at", *begun)
    if helper is not None:
        helper.kill()
        helper.wait()
    rw.leave()


main()
