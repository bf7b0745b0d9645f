# SPDX-License-Identifier: Apache-2.0
"""Kill a rank at random moments of the update that the ranks of a host divide; nothing may be lost, hang or differ.

``python tests/faults/kills_in_update.py [--kills 30] [--seed 0]``. The ranks share one copy of the parameters. In each
attempt one of them is killed by an alarm that is set when it calls ``optimizer.step()``, and that is due after a random
part of the time that a step takes. The others catch the error and note what they then hold: all of them must hold the
same parameters, bit by bit those of an undisturbed training before that step or after it. Every other kill ends the
job, so that they have the time for it; after the rest, ``rankwise run`` restarts the ranks. They continue from their
last checkpoint, and the end must be bit-equal to that of the undisturbed training.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

TRAIN = """
import glob, hashlib, os, random, signal, statistics, sys, time
import torch
import rankwise as rw
from torch.nn import Linear, Tanh

kind, num_kills, seed, steps = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])

def digest(model):
    return hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in model.parameters())).hexdigest()

def note(name, text):
    with open(name, "w") as file:
        file.write(text)

signal.signal(signal.SIGALRM, signal.SIG_DFL)
with rw.join() as world:
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(40, 64), torch.randn(40, 64))
    model = torch.nn.Sequential(Linear(64, 900), Tanh(), Linear(900, 64), Tanh(), Linear(64, 900), Linear(900, 64))
    rw.replicate(model, one_copy_per_host=True)
    optimizer = getattr(torch.optim, kind)(model.parameters(), 0.01)
    loader = rw.DataLoader(data, global_batch_size=8, shuffle=True)
    checkpoints = rw.Checkpointer("net", keep=2)
    extra = {"steps": 0}
    objects = {"model": model, "optimizer": optimizer, "loader": loader, "extra": extra}
    checkpoints.restore(**objects)
    kills = rw.broadcast_object(len(glob.glob("kill-*")))
    draw = random.Random(f"{seed} {kills}")
    victim, first, part = draw.randrange(world.world_size), draw.randint(4, 7), draw.uniform(0.0, 1.2)
    spent = []
    while extra["steps"] < steps:
        for x, y in loader:
            if extra["steps"] == steps:
                break
            try:
                torch.nn.functional.mse_loss(model(x), y).backward()
                if kills < num_kills and world.rank == victim and len(spent) == first:
                    note(f"kill-{kills}", f"rank {victim}, {part:.2f} of step {extra['steps']}")
                    signal.setitimer(signal.ITIMER_REAL, max(part * statistics.median(spent[2:]), 1e-6))
                began = time.perf_counter()
                optimizer.step()
                spent.append(time.perf_counter() - began)
                optimizer.zero_grad()
                extra["steps"] += 1
                if not num_kills and world.rank == 0:
                    note(f"step-{extra['steps']}", digest(model))
                rw.barrier()
                if extra["steps"] % 3 == 0:
                    checkpoints.save(**objects)
            except rw.errors.RankwiseError:
                note(f"survivor-{kills}-{world.rank}", digest(model))
                raise
    checkpoints.close()
    rw.save("end", model=model, optimizer=optimizer)
"""
NUM_RANKS = 3
LIMIT_SECONDS = 120.0
"""For one job."""


def _train(folder: Path, kind: str, options: argparse.Namespace, num_kills: int) -> list[int]:
    """Train with so many kills in ``folder``, and start again whenever the job fails.

    Returns:
        The numbers of the kills that ended a job: the launcher kills the others at once only where it restarts all.

    Raises:
        RuntimeError: the job failed without a kill, with its output.
    """
    (folder / "train.py").write_text(TRAIN, encoding="utf-8")
    command = [sys.executable, "-m", "rankwise", "run", "-n", str(NUM_RANKS), "--max-restarts", "1", "train.py"]
    command += [kind, str(num_kills), str(options.seed), str(options.steps)]
    ended: list[int] = []
    while True:
        before = len(list(folder.glob("kill-*")))
        done = subprocess.run(command, cwd=folder, capture_output=True, check=False, text=True, timeout=LIMIT_SECONDS)
        if done.returncode == 0:
            return ended
        after = len(list(folder.glob("kill-*")))
        if after == before:
            raise RuntimeError(done.stdout + done.stderr)
        ended.append(after - 1)


def _told(folder: Path, number: int, steps: dict[str, int], *, has_ended: bool) -> tuple[str, bool]:
    """Return what became of the survivors of a kill, in words, and whether that is right."""
    where = (folder / f"kill-{number}").read_text(encoding="utf-8")
    held = [path.read_text(encoding="utf-8") for path in folder.glob(f"survivor-{number}-*")]
    if has_ended and len(held) != NUM_RANKS - 1:
        return f"{where}: not every other rank caught an error", False
    if not held:
        return f"{where}: restarted", True
    if len(set(held)) > 1 or held[0] not in steps:
        return f"{where}: the others hold {len(set(held))} versions of the parameters", False
    behind = steps[held[0]] - int(where.rpartition(" ")[2])
    return f"{where}: {['undone', 'taken'][behind] if behind in (0, 1) else f'off by {behind}'}", behind in (0, 1)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=0, help="by default enough for the kills")
    parser.add_argument("--kinds", nargs="+", default=["AdamW", "SGD"])
    options = parser.parse_args()
    per_kind = -(-options.kills // len(options.kinds))
    # An attempt restarts at a multiple of 3 and lives for at least 4 steps.
    options.steps = options.steps or 12 + 6 * per_kind
    results: Counter[str] = Counter()
    for kind in options.kinds:
        with tempfile.TemporaryDirectory() as undisturbed, tempfile.TemporaryDirectory() as disturbed:
            whole, folder = Path(undisturbed), Path(disturbed)
            _train(whole, kind, options, 0)
            steps = {path.read_text(encoding="utf-8"): int(path.name[5:]) for path in whole.glob("step-*")}
            ended = _train(folder, kind, options, per_kind)
            for number in range(len(list(folder.glob("kill-*")))):
                told, is_right = _told(folder, number, steps, has_ended=number in ended)
                results["right" if is_right else "wrong"] += 1
                results[told.rpartition(" ")[2]] += 1
                print(f"{'ok' if is_right else 'NOT':5}{kind}, {told}", flush=True)
            files = sorted(path.name for path in (whole / "end").glob("*.safetensors"))
            is_equal = bool(files) and all(
                (whole / "end" / name).read_bytes() == (folder / "end" / name).read_bytes() for name in files
            )
            results["right" if is_equal else "wrong"] += 1
            print(f"{'ok' if is_equal else 'NOT':5}{kind}: bit-equal at the end", flush=True)
    told = ", ".join(f"{results[name]} {name}" for name in ("undone", "taken", "restarted", "wrong"))
    print(f"kills: {told}")
    return int(results["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
