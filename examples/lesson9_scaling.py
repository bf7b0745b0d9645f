# SPDX-License-Identifier: Apache-2.0
"""Lesson 9 of the course: train a 3D UNet on one rank and on more, and draw how the pace grows.

python examples/lesson9_scaling.py --plot scaling.svg        # needs the extra: pip install rankwise[monai]
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

from curve import draw

RANKWISE = [sys.executable, "-m", "rankwise"]
SMALL = "--volumes 4 --size 32 --crop 32 --global-batch-size 4 --epochs 6"
CROPS_PER_STEP = 8
"""Two of each of the four volumes."""
SECONDS = {"s": 1.0, "ms": 1e-3}


def train(ranks: int, folder: Path) -> tuple[list[str], float]:
    """Train on so many ranks; return the losses and the crops per second."""
    script = Path(__file__).with_name("unet3d.py")
    words = ["run", "-n", str(ranks), "--report", str(folder / str(ranks)), str(script), "--data", str(folder / "data")]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # so that only the number of ranks differs
    done = subprocess.run(
        [*RANKWISE, *words, *SMALL.split()], env=one_thread, check=True, stdout=subprocess.PIPE, text=True
    )
    said = subprocess.run(
        [*RANKWISE, "report", str(folder / str(ranks))], check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    found = re.search(r"steps of ([\d.,]+) (m?s)", said)
    if found is None:
        raise SystemExit(f"the report has no time of a step: {said}")
    return re.findall(r"Dice loss (\S+)", done.stdout), CROPS_PER_STEP / (float(found[1]) * SECONDS[found[2]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most-ranks", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("runs/lesson9"))
    parser.add_argument("--plot", type=Path, help="picture of the crops per second over the ranks, as .svg")
    options = parser.parse_args()

    curve: list[tuple[float, float]] = []
    for ranks in range(1, options.most_ranks + 1):
        losses, pace = train(ranks, options.folder)
        curve.append((ranks, pace))
        print(f"{ranks} rank(s): Dice loss {' '.join(losses)}, {pace:.1f} samples/s", flush=True)
    if options.plot:
        ideal = [(ranks, ranks * curve[0][1]) for ranks, _ in curve]
        draw(
            options.plot,
            {"ideal": ideal, "measured": curve},
            x_label="ranks",
            y_label="crops per second",
            title="Pace of a 3D UNet over the number of ranks",
        )


if __name__ == "__main__":
    main()
