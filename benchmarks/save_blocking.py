# SPDX-License-Identifier: Apache-2.0
"""How long training is blocked by an asynchronous save of 200 MB, against a synchronous torch.save."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import torch
from measure import Row, interleaved, median_ratio, seconds, show

import rankwise as rw

NUM_TENSORS = 50
TENSOR_BYTES = 4 * 10**6
REPETITIONS = 9
REACH = 0.2


def measure() -> Row:
    """Return the row."""
    state = {f"tensor{n}": torch.randn(TENSOR_BYTES // 4) for n in range(NUM_TENSORS)}
    with tempfile.TemporaryDirectory(dir=".") as folder, rw.join():
        checkpoints = rw.Checkpointer(Path(folder) / "ours", keep=1, asynchronous=True)

        def ours() -> float:
            started = time.perf_counter()
            checkpoints.save(state=state)
            blocked = time.perf_counter() - started
            checkpoints.wait()
            return blocked

        def peer() -> float:
            started = time.perf_counter()
            torch.save(state, Path(folder) / "peer.pt")
            return time.perf_counter() - started

        sides = {"rankwise": ours, "torch.save": peer}
        interleaved(sides, 1)
        figures = interleaved(sides, REPETITIONS)
        checkpoints.close()
    return Row(
        "training blocked by an asynchronous save of 200 MB, against torch.save",
        seconds(statistics.median(figures["rankwise"])),
        seconds(statistics.median(figures["torch.save"])),
        median_ratio(figures["rankwise"], figures["torch.save"]),
        REACH,
    )


if __name__ == "__main__":
    show([measure()])
