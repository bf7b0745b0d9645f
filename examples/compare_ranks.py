# SPDX-License-Identifier: Apache-2.0
"""Run examples/digits.py on one rank and on two, and print both side by side.

python examples/compare_ranks.py [arguments of digits.py]
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

RANKS = (1, 2)
LEAST_ACCURACY = 0.97
PROMISE = {torch.float64: 1e-10, torch.float32: 1e-5}


def train(ranks: int, folder: Path, arguments: list[str]) -> tuple[dict, dict[str, torch.Tensor]]:
    """Train on ``ranks`` ranks; return the figures and the final parameters."""
    script = Path(__file__).with_name("digits.py")
    command = [sys.executable, "-m", "rankwise", "run", "-n", str(ranks), str(script)]
    subprocess.run([*command, "--report", str(folder), *arguments], check=True)
    return json.loads((folder / "figures.json").read_text()), torch.load(folder / "parameters.pt")


def largest_difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of any parameter, relative to the largest value of its tensor."""
    return max(float((left[key] - right[key]).abs().max() / right[key].abs().max()) for key in left)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        runs = [train(ranks, Path(folder) / str(ranks), sys.argv[1:]) for ranks in RANKS]
    (one, one_parameters), (two, two_parameters) = runs
    difference = largest_difference(two_parameters, one_parameters)
    limit = PROMISE[next(iter(one_parameters.values())).dtype]

    print(f"\n{'':24}{'1 rank':>20}{'2 ranks':>20}")
    for epoch, losses in enumerate(zip(one["losses"], two["losses"], strict=True), start=1):
        print(f"{f'loss, epoch {epoch}':24}{losses[0]:20.12f}{losses[1]:20.12f}")
    print(f"{'test accuracy':24}{one['accuracy']:20.4f}{two['accuracy']:20.4f}")
    print(f"{'samples/s':24}{one['samples_per_second']:20.0f}{two['samples_per_second']:20.0f}")
    print(f"{'largest difference':24}{difference:40.1e}   (the promise: at most {limit:.0e})")

    reached = min(one["accuracy"], two["accuracy"])
    if difference > limit or reached < LEAST_ACCURACY:
        print(f"\nNot what rankwise promises: accuracy {reached:.4f}, difference {difference:.1e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
