# SPDX-License-Identifier: Apache-2.0
"""One training step with AdamW on 2 ranks, in several libraries, side by side: `make bench-peers`.

Each library has two processes of its own, which wait in the kernel until it is their turn. Turns are a few steps
long and interleaved, so that the machine's drift cancels. Batches are made beforehand, the same for every library:
the step is what is measured, by its slower rank. Before that, each library's ranks must agree with one another and
with DDP's after some steps on unequal batches.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import tempfile
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
from measure import interleaved, machine, median_ratio, seconds
from models import ALL_MODELS
from peer_group import Group, GroupError, Side

DDP = Side("DDP", "ddp", None)
ALONE = Side("no exchange", "alone", None)
SIDES = (
    Side("rankwise", "rankwise", "rankwise"),
    DDP,
    Side("Accelerate", "accelerate", "accelerate"),
    Side("Fabric", "fabric", "lightning-fabric"),
    Side("Ignite", "ignite", "pytorch-ignite"),
    Side("Ray Train", "ray_train", "ray", starts_ranks=True),
    ALONE,
)
STEPS_PER_TURN = {"60 small layers": 40, "wide MLP": 5, "transformer": 2, "MONAI 3D UNet": 2}
CHECKED_STEPS = 5
TOLERANCE = 1e-4
"""Of the way that DDP's parameters went: how far others may end from them."""


def check(groups: dict[str, Group], model: str) -> None:
    """Train a little from the same start and see that ranks exchanged their gradients.

    Raises:
        GroupError: parameters disagree within a group or with DDP's, or they would agree without an exchange.
    """
    ended: dict[str, list[np.ndarray]] = {}
    start = np.empty(0)
    for name, group in groups.items():
        group.ask("build", model, lively=True)
        start = group.ask("parameters")[0]
        group.ask("run", CHECKED_STEPS)
        ended[name] = group.ask("parameters")
    reference = ended[DDP.name][0]
    way = np.abs(reference - start).max()

    def apart(ours: np.ndarray, theirs: np.ndarray) -> float:
        return float(np.abs(ours - theirs).max() / way)

    alone = apart(*ended.pop(ALONE.name))
    if not alone > 10 * TOLERANCE:
        raise GroupError(
            f"{model}: ranks without an exchange are only {alone:.1e} apart, so that the check says nothing"
        )
    for name, ranks in ended.items():
        between, beside = apart(*ranks), max(apart(rank, reference) for rank in ranks)
        if not max(between, beside) <= TOLERANCE:
            raise GroupError(
                f"{name}, {model}: after the same steps its ranks are {between:.1e} apart and {beside:.1e} from DDP's, "
                f"as parts of the way DDP's parameters went; {TOLERANCE:g} is allowed"
            )


def measure(groups: dict[str, Group], model: str, rounds: int) -> dict[str, list[float]]:
    """Return the seconds per step of each group, turn by turn."""
    for group in groups.values():
        group.ask("build", model, lively=False)
    num_steps = STEPS_PER_TURN[model]
    sides = {name: lambda group=group: max(group.ask("run", num_steps)) for name, group in groups.items()}
    interleaved(sides, 2)
    return interleaved(sides, rounds)


def main() -> int:
    parser = argparse.ArgumentParser(description="A training step beside other libraries.")
    parser.add_argument("--rounds", type=int, default=20, help="turns of each library and model")
    rounds = parser.parse_args().rounds
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    versions: dict[str, str] = {}
    missing: dict[str, str] = {}
    for side in SIDES:
        try:
            if side.distribution is not None:
                versions[side.name] = f"{side.distribution} {version(side.distribution)}"
        except PackageNotFoundError as error:
            missing[side.name] = f"not installed: {error}"
    print(f"{machine()}\n{', '.join(versions.values())}\n", flush=True)
    head = [f"| model | {' | '.join(side.name for side in SIDES)} |", "|---" * (1 + len(SIDES)) + "|"]
    print("\n".join(head), flush=True)
    with tempfile.TemporaryDirectory(prefix="peers-", ignore_cleanup_errors=True) as folder, ExitStack() as stack:
        groups: dict[str, Group] = {}
        for side in SIDES:
            if side.name not in missing:
                print(f"... starting {side.name}", file=sys.stderr, flush=True)
                groups[side.name] = stack.enter_context(Group(side, Path(folder)))
        for model in ALL_MODELS:
            print(f"... {model}", file=sys.stderr, flush=True)
            check(groups, model)
            figures = measure(groups, model, rounds)
            cells = missing | {
                name: f"{seconds(statistics.median(taken))}, {median_ratio(taken, figures[DDP.name]):.2f}"
                for name, taken in figures.items()
            }
            print(f"| {model} | {' | '.join(cells[side.name] for side in SIDES)} |", flush=True)
    print(f"\nTime per step with AdamW, and its ratio to DDP's: medians of {rounds} turns.")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except GroupError as error:
        sys.exit(f"bench-peers: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
