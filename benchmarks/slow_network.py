# SPDX-License-Identifier: Apache-2.0
"""A training step of two hosts over a link of 100 Mbit/s: each compression of gradients against plain DDP.

The hosts are network namespaces of this machine, one rank each. Bytes are those that a host's network card sent.
Needs root and iproute2.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from measure import Row, interleaved, median_ratio, seconds, show
from models import MODELS
from torch.nn.parallel import DistributedDataParallel

import rankwise as rw

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

MBIT = 100
ROUNDS = 5
COMPRESSED = {
    "bf16": 0.55,
    "fp16": 0.55,
    "int8": 0.3,
    "powersgd": 0.1,
    "top-k": 0.1,
}
"""Each way, and the ratio of its bytes to DDP's to stay below."""


def _sent_bytes() -> int:
    """Return what this host's network card has sent."""
    lines = Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines()
    fields = next(line.split(":")[1].split() for line in lines if line.strip().startswith("eth0:"))
    return int(fields[8])


def _step(wrap: Callable[[nn.Module], nn.Module], sent: list[int]) -> Callable[[], float]:
    torch.manual_seed(0)
    plain, shape = MODELS["wide MLP"]()
    model = wrap(plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(shape)

    def once() -> float:
        dist.barrier()
        before, started = _sent_bytes(), time.perf_counter()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        spent = time.perf_counter() - started
        sent.append(_sent_bytes() - before)
        return spent

    return once


def run_rank() -> None:
    """Measure on this rank, and print the figures."""
    torch.set_num_threads(1)
    with rw.join():
        sent: dict[str, list[int]] = {name: [] for name in (*COMPRESSED, "none", "ddp")}
        sides = {name: _step(partial(rw.replicate, compress=name), sent[name]) for name in COMPRESSED}
        sides["none"] = _step(rw.replicate, sent["none"])
        sides["ddp"] = _step(DistributedDataParallel, sent["ddp"])
        interleaved(sides, 2)
        figures = interleaved(sides, ROUNDS)
        print(json.dumps({"seconds": figures, "bytes": {name: statistics.median(all_) for name, all_ in sent.items()}}))


def measure() -> list[Row]:
    """Return the rows."""
    # The hosts that the tests use, too.
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "multihost"))
    from hosts import Hosts  # noqa: PLC0415 - found just now

    with Hosts(2, mbit=MBIT) as hosts:
        first, *_ = hosts.run_ranks(Path(__file__), 1, "--rank", timeout_seconds=400)
    found = json.loads(first.stdout.strip().splitlines()[-1])
    times, num_bytes = found["seconds"], found["bytes"]
    rows = []
    for name, reach in {"none": 1.05, **COMPRESSED}.items():
        what = f"compress={name!r}, wide MLP, 2 hosts at {MBIT} Mbit/s, against DDP"
        rows += [
            Row(
                f"step, {what}",
                seconds(statistics.median(times[name])),
                seconds(statistics.median(times["ddp"])),
                median_ratio(times[name], times["ddp"]),
                1.05,
            ),
            Row(
                f"bytes sent per step, {what}",
                f"{num_bytes[name] / 2**20:.2f} MiB",
                f"{num_bytes['ddp'] / 2**20:.2f} MiB",
                num_bytes[name] / num_bytes["ddp"],
                reach,
            ),
        ]
    return rows


if __name__ == "__main__":
    if "--rank" in sys.argv:
        run_rank()
    else:
        show(measure())
