# SPDX-License-Identifier: Apache-2.0
"""Kill ranks of ``rankwise run --auto`` at random moments: nothing may hang, be left behind, or be half written.

``OMP_NUM_THREADS=1 python tests/faults/kills_under_auto.py [--kills 200] [--seed 0]``. Each kill ends a server or rank
zero of a job with SIGKILL. The job must end within 30 s, by itself, with the exit code and the name of that rank; no
process and no file may remain; a checkpoint that the script replaces atomically must be whole.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.warm import MARK, WarmPython, variables

LIMIT_SECONDS = 30.0
TRAIN = """
import os, sys
import torch
from torch import nn
torch.manual_seed(0)
kind = sys.argv[1]
if kind == "mlp":
    model, shape = nn.Sequential(nn.Linear(64, 256), nn.Dropout(0.1), nn.ReLU(), nn.Linear(256, 8)), (64,)
elif kind == "cnn":
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.Flatten()
    model, shape = nn.Sequential(*layers, nn.Linear(8 * 64, 8)), (3, 12, 12)
else:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model, shape = nn.Sequential(layer, nn.Flatten(), nn.Linear(8 * 32, 8)), (8, 32)
data = torch.utils.data.TensorDataset(torch.randn(160, *shape), torch.randint(8, (160,)))
workers = 1 if kind == "mlp" else 0
loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True, num_workers=workers)
optimizer = torch.optim.AdamW(model.parameters())
for epoch in range(10**6):
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.save({"model": model.state_dict(), "loss": loss.item()}, "partial.pt")
        os.replace("partial.pt", "saved.pt")
    if epoch == 0:
        print(os.getpid(), flush=True)
"""
KINDS = ["mlp", "cnn", "transformer"]


def _processes(mark: str) -> list[int]:
    """Return every living process of a job."""
    found: list[int] = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in entry.read_bytes():
                found.append(int(entry.parent.name))
    return found


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
    return 0


def _once(python: WarmPython, folder: Path, draw: random.Random, num_ranks: int) -> tuple[str, float, list[str]]:
    """Run a job and kill one of its ranks; return which, the seconds to the end of the job, and what is wrong."""
    mark, kind = uuid.uuid4().hex, draw.choice(KINDS)
    (folder / "train.py").write_text(TRAIN, encoding="utf-8")
    environment = {**variables(), MARK: mark, "RANKWISE_AUTO_SPLIT": "always", "TMPDIR": str(folder)}
    words = ["-m", "rankwise", "run", "-n", str(num_ranks), "--auto", "train.py", kind]
    job = python.start(words, folder, environment)
    assert job.stdout is not None
    rank_zero = int(job.stdout.readline())
    servers = [pid for pid in _processes(mark) if pid != rank_zero and _parent(pid) == _parent(rank_zero)]
    whom = draw.choice(["a server", "rank zero"])
    time.sleep(draw.uniform(0.0, 0.3))
    os.kill(rank_zero if whom == "rank zero" else draw.choice(servers), signal.SIGKILL)
    killed, wrong = time.monotonic(), list[str]()
    try:
        _, text = job.communicate(timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        job.kill()
        _, text = job.communicate()
        wrong.append("it hangs")
    seconds = time.monotonic() - killed
    if job.returncode != 128 + signal.SIGKILL:
        wrong.append(f"exit code {job.returncode}")
    named, _, _ = text.partition(" failed first: killed by SIGKILL")
    if named == text or ("rank 0 of " in named.splitlines()[-1]) != (whom == "rank zero"):
        wrong.append("the rank is not named")
    if "Traceback" in text or "runs whole" in text:
        wrong.append("another error is shown")
    left = _processes(mark)
    wrong += [f"process {pid} is left" for pid in left]
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    files = {one.name for one in folder.iterdir()} - {"train.py", "saved.pt", "partial.pt"}
    wrong += [f"{name} is left" for name in sorted(files)]
    try:
        torch.load(folder / "saved.pt", weights_only=True)
    except Exception as error:  # noqa: BLE001 - whatever a damaged file raises
        wrong.append(f"saved.pt: {error}")
    return f"{whom} of {num_ranks}, {kind}", seconds, [*wrong, text] if wrong else []


def main() -> int:
    """Kill again and again; return 1 if anything was wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw, num_wrong, slowest = random.Random(options.seed), 0, 0.0
    python = WarmPython(variables())
    for number in range(1, options.kills + 1):
        with tempfile.TemporaryDirectory() as folder:
            whom, seconds, wrong = _once(python, Path(folder), draw, draw.choice([2, 3]))
        slowest, num_wrong = max(slowest, seconds), num_wrong + bool(wrong)
        print(f"{'NOT' if wrong else 'ok':5}kill {number} of {whom}: ended after {seconds:.1f} s", *wrong, flush=True)
    python.close()
    print(f"{options.kills} kills, {num_wrong} with something wrong; the slowest end took {slowest:.1f} s")
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
