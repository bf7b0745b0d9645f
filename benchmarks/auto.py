# SPDX-License-Identifier: Apache-2.0
"""A training step of an unedited script under `rankwise run -n 2 --auto`, whole loop.

Against the same script under plain Python, and against the script rewritten by hand for DistributedDataParallel, on the
same global batch. Loading, loss and optimizer are part of the step. Each side is a command of its own, in turn, one
thread per rank; a figure is the median over steps, without the first ones, of the time per step.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from measure import Row, interleaved, median_ratio, seconds, show

NUM_RANKS = 2
REPETITIONS = 7
NUM_STEPS = 80
SCRIPT = """
import os, statistics, time, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(1)
torch.manual_seed(0)
model, shape, batch_size = {model}
length = {length}
{before}
dataset = TensorDataset(torch.randn(batch_size * 20, *shape), torch.randint(0, 10, (batch_size * 20,)))
loader = {loader}
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
times = []
while len(times) < {num_steps}:
    started = time.perf_counter()
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x[:, : length()]).reshape(len(y), -1)[:, :10], y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        times.append(time.perf_counter() - started)
        started = time.perf_counter()
if int(os.environ.get("RANK", "0")) == 0:
    print("seconds", statistics.median(times[40:]))
{after}
"""
PLAIN = {"before": "", "loader": "DataLoader(dataset, batch_size=batch_size, shuffle=True)", "after": ""}
BY_HAND = {
    "before": """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler
dist.init_process_group("gloo")
model = DistributedDataParallel(model)
""",
    "loader": "DataLoader(dataset, batch_size=batch_size // 2, sampler=DistributedSampler(dataset))",
    "after": "dist.barrier()\ndist.destroy_process_group()",
}
ENCODER = (
    "nn.TransformerEncoder(nn.TransformerEncoderLayer(128, 4, 256, batch_first=True), 2, enable_nested_tensor=False)"
)
MODELS = {
    "conv net": (
        "nn.Sequential(nn.Conv2d(1, 16, 5), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 5), "
        "nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 10)), (1, 28, 28), 128"
    ),
    "transformer": f"{ENCODER}, (64, 128), 32",
    "transformer, flattened output": (
        f"nn.Sequential({ENCODER}, nn.Linear(128, 10), nn.Flatten(0, 1), nn.Linear(10, 10)), (64, 128), 32"
    ),
    "transformer, varying lengths": f"{ENCODER}, (64, 128), 32",
    "wide MLP": "nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(1024, 1024), nn.ReLU())]), (1024,), 256",
    "small MLP": (
        "nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)), (64,), 128"
    ),
}
LENGTHS = {"transformer, varying lengths": "lambda: 48 + 8 * (len(times) % 3)"}
"""The length of a batch's sequences, in Python; others have their full length."""


def timed(command: list[str], parts: dict[str, str], name: str) -> float:
    """Return the seconds per step that a script prints."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.py"
        path.write_text(
            SCRIPT.format(model=MODELS[name], length=LENGTHS.get(name, "lambda: None"), num_steps=NUM_STEPS, **parts)
        )
        done = subprocess.run(
            [*command, str(path)],
            check=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    return next(float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("seconds"))


def measure(name: str) -> list[Row]:
    """Return the rows of one model."""
    auto = [sys.executable, "-m", "rankwise", "run", "-n", str(NUM_RANKS), "--auto"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}"]
    figures = interleaved(
        {
            "auto": partial(timed, auto, PLAIN, name),
            "plain": partial(timed, [sys.executable], PLAIN, name),
            "ddp": partial(timed, torchrun, BY_HAND, name),
        },
        REPETITIONS,
    )
    return [
        Row(
            f"step of an unedited script, {name}, {NUM_RANKS} ranks, against {words}",
            seconds(statistics.median(figures["auto"])),
            seconds(statistics.median(figures[peer])),
            median_ratio(figures["auto"], figures[peer]),
        )
        for peer, words in (("plain", "one process"), ("ddp", "the script rewritten for DDP"))
    ]


if __name__ == "__main__":
    show([row for name in MODELS for row in measure(name)])
