# SPDX-License-Identifier: Apache-2.0
"""A restart that cannot read the checkpoints ends the job; it never starts from scratch, and removes none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.e2e.conftest import Command

SCRIPT = """
import os, pathlib, shutil, signal, sys
import torch
import rankwise as rw

with rw.join() as world:
    model = rw.replicate(torch.nn.Linear(2, 2))
    checkpoints = rw.Checkpointer("net", keep=1)
    if checkpoints.restore(model=model, extra=(extra := {"n": 0})) is None:
        print("from scratch", flush=True)
    for _ in range(3):
        extra["n"] += 1
        checkpoints.save(model=model, extra=extra)
        rw.barrier()
        if world.rank == 0:
            newest = max(pathlib.Path("net").glob("checkpoint-*"))
            if sys.argv[1] == "a circle":
                (newest / "manifest.json").rename("manifest.json")
                (newest / "manifest.json").symlink_to("manifest.json")
            elif sys.argv[1] == "removed":
                shutil.rmtree("net")
            else:
                (newest / "manifest.json").write_text("{}")
            os.kill(os.getpid(), signal.SIGKILL)
        rw.barrier()
"""


@pytest.mark.parametrize(
    ("trouble", "text"),
    [
        ("a circle", "Too many levels of symbolic links"),
        ("empty", "holds checkpoints, and all are damaged"),
        ("removed", "and none is there any more"),
    ],
)
def test_the_job_ends(command: Command, trouble: str, text: str) -> None:
    command.write("train.py", SCRIPT)
    ended = command.run("-n", "2", "--max-restarts", "1", "train.py", trouble)
    assert ended.returncode not in {0, 75}
    assert ended.stdout.count("from scratch") == 2, "each rank, in the first attempt only"
    assert text in ended.stderr
    if trouble != "removed":
        assert (command.folder / "net" / "checkpoint-000001" / "part-00000.safetensors").exists()
