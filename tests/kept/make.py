# SPDX-License-Identifier: Apache-2.0
"""Write the files that ``test_kept_files.py`` and ``test_kept_trainings.py`` load.

Run it from the root of the repository, with the version of rankwise whose files are to be kept::

    .venv/bin/python tests/kept/make.py

It replaces ``tests/kept/files.tar.xz``: checkpoints of every arrangement, weights, snapshots of parameter servers,
commits of elastic states, pickles, and the expected contents of each, in plain safetensors and JSON. Run it when a
format gets a new version, keep the old archive under another name, and have the tests load both. Never run it to make
a test pass.
"""

from __future__ import annotations

import json
import pickle
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kept_arrangements import ARRANGEMENTS, write_arrangement, write_weights
from kept_pickles import values_by_class, write_pickles
from kept_states import serve, write_elastic
from kept_surroundings import write_surroundings
from safetensors.torch import save_file

from rankwise.testing import run_ranks

ARCHIVE = Path(__file__).parent / "files.tar.xz"


def ranks(fn: Any, world_size: int, *args: object) -> list[Any]:
    """Return the result of each rank."""
    return [result.get() for result in run_ranks(fn, world_size, *args)]


def one_of(found: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return all tensors that ranks hold, those of the lowest rank where several hold one."""
    return {name: tensor for of_rank in reversed(found) for name, tensor in of_rank.items()}


def expect(folder: Path, name: str, **tensors: dict[str, torch.Tensor]) -> None:
    """Write expected tensors to a file that any tool can read."""
    (folder / "expected").mkdir(exist_ok=True)
    named = {f"{kind}:{key}": tensor for kind, one in tensors.items() for key, tensor in one.items()}
    save_file(named, folder / "expected" / f"{name}.safetensors")


def checkpoints(folder: Path) -> None:
    """Write a checkpoint of every arrangement."""
    for name, arrangement in ARRANGEMENTS.items():
        with tempfile.TemporaryDirectory() as written:
            found = ranks(write_arrangement, arrangement.world_size, name, written)
            (Path(written) / name).rename(folder / name)
        # Each island has an optimizer of its own; the first one's is saved.
        count = arrangement.world_size // arrangement.axes.get("islands", 1)
        expect(folder, name, saved=one_of([one for one, _ in found[:count]]), after=one_of([one for _, one in found]))


def surroundings(folder: Path) -> None:
    """Write checkpoints of a training with everything around it, and the leftovers of an interrupted save."""
    found = ranks(write_surroundings, 2, str(folder / "surroundings"))[0]
    after = found["after"]
    expect(folder, "surroundings", saved=found["state"], after=after.pop("model"))
    (lock,) = found["lock"]
    owner = json.loads(lock) | {"hostname": "node-1", "machine": "of another day", "command": "train.py"}
    (folder / "lock").write_text(json.dumps(owner, indent=1) + "\n")
    told = {"positions": found["positions"], "after": after, "owner": owner}
    (folder / "expected" / "surroundings.json").write_text(json.dumps(told, indent=1))
    # A save that replaces a checkpoint renames the old one first: a machine may be lost before the second rename.
    newest = folder / "surroundings" / "checkpoint-000003"
    newest.rename(newest.with_name(f".{newest.name}.replaced-0123456789abcdef"))
    half = newest.with_name(".checkpoint-000004.staging-0123456789abcdef")
    half.mkdir()
    (half / "part-00000.safetensors").write_bytes(b"half")


def weights(folder: Path) -> None:
    """Write weights for other tools."""
    for name, saved in ranks(write_weights, 4, str(folder))[0].items():
        expect(folder, name, saved=saved)


def servers(folder: Path) -> None:
    """Write snapshots of parameter servers; expect the parameters six steps later too."""
    for mode, world_size, num_servers in (("sync", 4, 2), ("async", 2, 1)):
        kept = str(folder / f"server-{mode}")
        _, (saved, place) = ranks(serve, world_size, (mode, num_servers), 0.0, 6, kept)[0]
        with tempfile.TemporaryDirectory() as whole:
            _, (after, _) = ranks(serve, world_size, (mode, num_servers), 0.0, 12, whole)[0]
        expect(folder, f"server-{mode}", saved=saved, after=after)
        (folder / "expected" / f"server-{mode}.json").write_text(json.dumps(place))


def elastic(folder: Path) -> None:
    """Write commits of an elastic state."""
    (folder / "elastic").mkdir()
    found = ranks(write_elastic, 2, str(folder / "elastic"))
    expect(folder, "elastic", saved=found[0]["tensors"], after=found[0]["after"])
    left = [of_rank["left"] for of_rank in found]
    (folder / "expected" / "elastic.json").write_text(json.dumps(left))


def pickles(folder: Path) -> None:
    """Write models, optimizers and options that users pickle."""
    (folder / "pickles").mkdir()
    for which, world_size in (("one", 1), ("replicas", 2), ("islands", 2)):
        for name, held in ranks(write_pickles, world_size, which, str(folder / "pickles"))[0].items():
            expect(folder, f"pickle-{name}", saved=held)
    for name, value in values_by_class().items():
        (folder / "pickles" / f"{name}.pickle").write_bytes(pickle.dumps(value, protocol=4))


def main() -> None:
    """Write all of it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for write in (checkpoints, surroundings, weights, servers, elastic, pickles):
            write(folder)
        versions = {"torch": torch.__version__, "numpy": np.__version__}
        (folder / "versions.json").write_text(json.dumps(versions))
        with tarfile.open(ARCHIVE, "w:xz", preset=9) as archive:
            for path in sorted(folder.rglob("*")):
                archive.add(path, path.relative_to(folder), recursive=False, filter=_of_nobody)
    sys.stdout.write(f"{ARCHIVE}: {ARCHIVE.stat().st_size} bytes\n")


def _of_nobody(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry


if __name__ == "__main__":
    main()
