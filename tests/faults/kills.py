# SPDX-License-Identifier: Apache-2.0
"""Kill a training at random moments of its saves and restores until it ends; nothing may be lost, hang or differ.

``python tests/faults/kills.py [--kills 30] [--seed 0]``. Each training has a strategy, saves in the foreground or
beside its steps, and has one launcher, or one per rank as on two hosts. Each kill ends one rank or the whole job with
SIGKILL. After each, the folder's newest checkpoint must be whole and at least as new as every one that a rank has
reported; at the end the parameters must equal those of a training that nobody disturbed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rankwise.checkpoint.checkpointer import Checkpointer
from rankwise.checkpoint.folder import list_numbered
from rankwise.comm.join import join

TRAIN = """
import os, sys
import torch
import rankwise as rw
from torch.nn import Dropout, Linear, Tanh

asynchronous, strategy, steps = sys.argv[1] == "asynchronous", sys.argv[2], int(sys.argv[3])

def write(name, value):
    with open(name, "w") as file:
        file.write(str(value))

def number_in(name):
    return int(open(name).read() or 0) if os.path.exists(name) else 0

with rw.join() as world:
    ranks = world.world_size
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(40, 64).double(), torch.randn(40, 64).double())
    layers = Linear(64, 504), Dropout(0.1), Linear(504, 64), Tanh(), Linear(64, 64)
    model, loss_fn, step = torch.nn.Sequential(*layers).double(), torch.nn.functional.mse_loss, None
    if strategy == "tensor_parallel":
        rw.mesh(tp=ranks)
        rw.tensor_parallel(model, {"0": "column", "2": "row"})
    elif strategy == "pipeline":
        rw.mesh(pp=ranks)
        # Without split=, the cut follows measured times, and with it which rank draws.
        cut = ["2", "4"][: ranks - 1]
        step = rw.pipeline(model, loss_fn, example=torch.zeros(2, 64).double(), micro_batches=4, split=cut)
    else:
        getattr(rw, strategy)(model)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    loader = rw.DataLoader(data, global_batch_size=8, shuffle=True)
    checkpoints = rw.Checkpointer("net", keep=2, asynchronous=asynchronous)
    extra = {"steps": 0}
    objects = {"model": model, "optimizer": optimizer, "loader": loader, "extra": extra}
    phase = f"phase-{world.rank}"
    write(phase, "restore")
    write(f"pid-{world.rank}", os.getpid())
    checkpoints.restore(**objects)
    if world.rank == 0:
        if extra["steps"] < max(number_in("reported"), number_in("restored")):
            write("lost", f"{extra} after {number_in('reported')} and {number_in('restored')}")
        write("restored", extra["steps"])
    while extra["steps"] < steps:
        for x, y in loader:
            if extra["steps"] == steps:
                break
            write(phase, "step")
            if step is None:
                loss_fn(model(x), y).backward()
            else:
                step(x, y)
            optimizer.step()
            optimizer.zero_grad()
            extra["steps"] += 1
            write(phase, "save")
            path = checkpoints.save(**objects)
            if not asynchronous and world.rank == 0:
                write("reported", extra["steps"])
    write(phase, "end")
    checkpoints.close()
    rw.save("end", model=model, optimizer=optimizer)
"""
STRATEGIES = ["replicate", "shard", "tensor_parallel", "pipeline"]
LIMIT_SECONDS = 120.0


class Job:
    """The launchers of one training: one for both ranks, or one for each."""

    def __init__(self, folder: Path, words: list[str], num_launchers: int) -> None:
        command = [sys.executable, "-m", "rankwise", "run", "-n", str(2 // num_launchers)]
        if num_launchers > 1:
            with socket.create_server(("127.0.0.1", 0)) as server:
                address = f"127.0.0.1:{server.getsockname()[1]}"
            command += ["--nodes", str(num_launchers), "--rendezvous", address]
        with (folder / "output.txt").open("ab") as output:
            self._launchers = [
                subprocess.Popen(
                    [*command, "train.py", *words], cwd=folder, stdout=output, stderr=output, start_new_session=True
                )
                for _ in range(num_launchers)
            ]

    def wait(self, seconds: float) -> int:
        """Return an exit code that is not 0, if there is one, when every launcher has ended."""
        deadline = time.monotonic() + seconds
        codes = [one.wait(max(0.0, deadline - time.monotonic())) for one in self._launchers]
        return next(filter(None, codes), 0)

    def has_ended(self) -> bool:
        """Whether every launcher has ended."""
        return all(one.poll() is not None for one in self._launchers)

    def kill(self) -> None:
        """Kill the launchers and all ranks."""
        for one in self._launchers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGKILL)


def _wait_for_ranks(job: Job, folder: Path) -> None:
    """Return when both ranks are about to restore, or the job has ended."""
    while not job.has_ended() and not all((folder / f"pid-{rank}").exists() for rank in (0, 1)):
        time.sleep(0.02)


def _kill(job: Job, folder: Path, draw: random.Random) -> str:
    """Kill one rank, or the launchers and all ranks; return which."""
    whom = draw.choice(["rank 0", "rank 1", "the job"])
    pid = folder / f"pid-{whom[-1]}"
    number = int(pid.read_text(encoding="utf-8") or "0") if whom != "the job" and pid.exists() else 0
    try:
        if number:
            os.kill(number, signal.SIGKILL)
        else:
            whom = "the job"
            job.kill()
    except ProcessLookupError:
        whom += ", which had ended"
    job.wait(LIMIT_SECONDS)
    for left in folder.glob("pid-*"):
        left.unlink()
    return whom


def _newest_whole(folder: Path) -> int:
    """Return the number of the checkpoint that restore() takes; 0 without one."""
    taken = Checkpointer(folder / "net").restore(extra={})
    numbers = {path.name: number for number, path in list_numbered(folder / "net").items()}
    return 0 if taken is None else numbers[taken.name]


def _train_to_the_end(folder: Path, words: list[str], num_launchers: int) -> float:
    """Train undisturbed; return the seconds from the restore to the end."""
    (folder / "train.py").write_text(TRAIN, encoding="utf-8")
    job = Job(folder, words, num_launchers)
    _wait_for_ranks(job, folder)
    began = time.monotonic()
    if job.wait(LIMIT_SECONDS):
        raise RuntimeError((folder / "output.txt").read_text(encoding="utf-8"))
    return time.monotonic() - began


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    draw, num_kills, lost = random.Random(options.seed), 0, 0
    join(device="cpu")
    while num_kills < options.kills:
        words = [draw.choice(["synchronous", "asynchronous"]), draw.choice(STRATEGIES), str(options.steps)]
        num_launchers = draw.choice([1, 2])
        with tempfile.TemporaryDirectory() as undisturbed, tempfile.TemporaryDirectory() as disturbed:
            whole, folder = Path(undisturbed), Path(disturbed)
            seconds = _train_to_the_end(whole, words, num_launchers)
            (folder / "train.py").write_text(TRAIN, encoding="utf-8")
            newest = 0
            while True:
                job = Job(folder, words, num_launchers)
                try:
                    _wait_for_ranks(job, folder)
                    ended = job.wait(draw.uniform(0.0, 0.5) * seconds)
                except subprocess.TimeoutExpired:
                    whom = _kill(job, folder, draw)
                else:
                    if ended:
                        raise RuntimeError((folder / "output.txt").read_text(encoding="utf-8"))
                    break
                num_kills += 1
                reported = folder / "reported"
                least = int(reported.read_text(encoding="utf-8") or 0) if reported.exists() else 0
                found = _newest_whole(folder)
                is_whole = found >= max(least, newest)
                lost += not is_whole
                newest = found
                print(
                    f"{'ok' if is_whole else 'LOST':5}kill {num_kills} of {whom}: {found} of {options.steps}",
                    flush=True,
                )
            files = sorted(path.name for path in (whole / "end").glob("*.safetensors"))
            is_equal = all(
                (whole / "end" / name).read_bytes() == (folder / "end" / name).read_bytes() for name in files
            )
            lost += not (files and is_equal)
            told = f"{' '.join(words)}, {num_launchers} launchers"
            print(f"{'ok' if files and is_equal else 'NOT':5}{told}: bit-equal at the end", flush=True)
    print(f"{num_kills} kills, {lost} with a loss or a difference")
    return int(lost > 0)


if __name__ == "__main__":
    sys.exit(main())
