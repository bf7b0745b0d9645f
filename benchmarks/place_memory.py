# SPDX-License-Identifier: Apache-2.0
"""Peak memory of loading a 400 MB checkpoint with `rw.place`, 40 % to the CPU, 60 % to disk, against the CPU's.

Each side is a process of its own, which counts its anonymous memory (RssAnon; pages of files can be dropped at any
time) from before the model is built until it has answered one batch. Beside it: the whole model in memory, filled by
`load_state_dict` from the same file.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Self

import torch
from measure import Row, show
from safetensors.torch import load_file, save_file
from torch import nn

from rankwise.place.place import place, placement

WIDTH = 1000
NUM_LAYERS = 100
NUM_ON_CPU = 40
REACH = 1.1
SAMPLE_SECONDS = 0.001


def model() -> nn.Sequential:
    """Return 100 layers of 4 MB."""
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)])


def anonymous_bytes() -> int:
    """Return how much memory of this process is no file's."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    message = "this kernel tells no RssAnon"
    raise RuntimeError(message)


class Peak:
    """The most anonymous memory while a block runs, above what there was before it."""

    def __enter__(self) -> Self:
        self.num_bytes = 0
        self._before = anonymous_bytes()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            self.num_bytes = max(self.num_bytes, anonymous_bytes() - self._before)
            if self._is_over.wait(SAMPLE_SECONDS):
                return


def loaded(side: str, file: Path, folder: Path) -> tuple[nn.Module, int]:
    """Return the loaded model, and how much of it is placed on the CPU."""
    if side == "place":
        with torch.device("meta"):
            ours = model()
        plan = {"": "disk"} | {str(number): "cpu" for number in range(NUM_ON_CPU)}
        place(ours, plan, checkpoint=file, offload_folder=folder)
        return ours, placement(ours).bytes_on["cpu"]
    peer = model()
    peer.load_state_dict(load_file(file))
    return peer, sum(parameter.nbytes for parameter in peer.parameters())


def measure(side: str, file: Path, folder: Path) -> dict[str, int]:
    """Load, answer one batch, and return the peak and the share of the CPU, in bytes."""
    torch.set_num_threads(1)
    with torch.no_grad():
        nn.Linear(2, 2)(torch.ones(1, 2))  # what the first call of anything needs
        with Peak() as peak:
            filled, share_bytes = loaded(side, file, folder)
            filled(torch.ones(1, WIDTH))
    return {"peak_bytes": peak.num_bytes, "share_bytes": share_bytes}


def run(side: str, file: Path, folder: Path) -> dict[str, int]:
    """Measure in a process of its own."""
    command = [sys.executable, __file__, "--side", side, str(file), str(folder)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


if __name__ == "__main__":
    if "--side" in sys.argv:
        side, file, folder = sys.argv[sys.argv.index("--side") + 1 :]
        print(json.dumps(measure(side, Path(file), Path(folder))))
        sys.exit()
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "model.safetensors"
        save_file(model().state_dict(), path)
        ours, peer = (run(side, path, Path(name) / "offload") for side in ("place", "load_state_dict"))
    show(
        [
            Row(
                "peak memory of loading a 400 MB checkpoint, 160 MB of it on the CPU and 240 MB on disk",
                f"{ours['peak_bytes'] / 1e6:.0f} MB",
                f"load_state_dict of it all: {peer['peak_bytes'] / 1e6:.0f} MB",
                ours["peak_bytes"] / ours["share_bytes"],
                REACH,
            )
        ]
    )
