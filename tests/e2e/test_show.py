# SPDX-License-Identifier: Apache-2.0
"""``rankwise show``: checkpoints, meshes, and the layouts that a run has recorded."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Command


def _marks(page: str, section: str) -> int:
    """Return how many marks the picture of a section has."""
    part = page.partition(f'<section id="{section}">')[2].partition("</section>")[0]
    return part.count("<rect")


def _written(folder: Path, name: str = "show.html") -> str:
    page = (folder / name).read_text(encoding="utf-8")
    assert not re.search(r"https?://(?!www\.w3\.org)", page), "nothing is fetched"
    return page


CHECKPOINT = """
import torch
import rankwise as rw

world = rw.join()
model = rw.shard(torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.Linear(200, 300)))
optimizer = torch.optim.Adam(model.parameters())
model(torch.randn(2, 300)).sum().backward()
optimizer.step()
rw.save("saved", model=model, optimizer=optimizer)
"""


def test_a_checkpoint_is_shown_with_its_files_and_tensors(command: Command) -> None:
    command.write("train.py", CHECKPOINT)
    assert command.run("-n", "2", "train.py").returncode == 0
    done = command.rankwise("show", "saved")
    assert done.returncode == 0, done.stderr
    first, *text, path = done.stdout.splitlines()
    assert re.fullmatch(r"2 objects with \d+ tensors, 1\.\d+ MiB in \d+ files, written by 2 ranks\.", first)
    assert path == "show.html"
    assert "Files of the checkpoint" in text
    assert re.search(r"^model\.0\.weight +float32 +\[200, 300\] +234 KiB", "\n".join(text), re.MULTILINE)
    page = _written(command.folder)
    for word in ("model: ", "optimizer: ", "model.0.weight", "[200, 300]", "float32"):
        assert word in page
    assert _marks(page, "files") >= 3
    assert _marks(page, "tensors") >= 4
    # The largest first; the optimizer's numbers of steps are the smallest.
    names = re.findall('<th scope="row">([^<]+)</th>', page.partition('<section id="tensors">')[2])
    assert "bias" not in names[0]
    assert names[-1].endswith("step")
    done = command.rankwise("show", "saved", "--language", "zh", "-o", "zh.html")
    assert "由 2 个 rank 写出" in done.stdout
    assert "检查点的张量" in _written(command.folder, "zh.html")


NUMBERED = """
import torch
import rankwise as rw

model = torch.nn.Linear(3, 2)
with rw.join():
    checkpoints = rw.Checkpointer("kept")
    checkpoints.save(model=model)
    checkpoints.save(model=model, text=["second"])
"""


def test_the_newest_of_several_checkpoints_is_shown(command: Command) -> None:
    command.write("train.py", NUMBERED)
    assert command.python("train.py").returncode == 0
    assert command.rankwise("show", "kept").stdout.startswith("2 objects with 2 tensors, ")
    first = min((command.folder / "kept").iterdir())
    assert command.rankwise("show", str(first)).stdout.startswith("1 object with 2 tensors, ")


def test_a_mesh_is_shown_before_a_run(command: Command) -> None:
    done = command.rankwise("show", "dp_shard=4,tp=2", "--ranks-per-host", "4")
    assert done.stdout.splitlines()[0] == "8 ranks on 2 hosts: dp_shard=4, tp=2."
    page = _written(command.folder)
    # The number of the rank, its host, and its place along two axes.
    assert _marks(page, "mesh") == 4 * 8
    assert "0, 1; 2, 3; 4, 5; 6, 7 (each within a host)" in page
    assert "0, 2, 4, 6; 1, 3, 5, 7 (across hosts)" in page


LAYOUTS = """
import torch
from torch import nn
import rankwise as rw

world = rw.join()
rw.mesh(pp=2)
net = nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)])
step = rw.pipeline(net, nn.MSELoss(), example=torch.zeros(8, 6), micro_batches=4)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
with step.measure():
    step(torch.randn(8, 6), torch.randn(8, 6))
optimizer.step()
"""


def test_the_layouts_of_a_run_are_shown(command: Command) -> None:
    command.write("train.py", LAYOUTS)
    done = command.run("-n", "2", "--report", "runs", "train.py")
    assert done.returncode == 0, done.stderr
    done = command.rankwise("show", "runs")
    assert done.returncode == 0, done.stderr
    page = _written(command.folder)
    assert _marks(page, "mesh") == 2 * 2
    # A forward and a backward per rank and micro-batch, at least.
    assert _marks(page, "schedule") >= 2 * 2 * 4
    assert command.rankwise("report", "runs").returncode == 0
    assert _marks(_written(command.folder / "runs", "report.html"), "schedule") >= 2 * 2 * 4


PLACED = """
import torch
import rankwise as rw

rw.join(report="runs")
model = torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.Linear(20, 30))
model = rw.place(model, plan={"0": "cpu", "1": "cpu"})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.randn(2, 30)).sum().backward()
optimizer.step()
"""


def test_the_devices_of_a_model_are_shown(command: Command) -> None:
    command.write("train.py", PLACED)
    done = command.python("train.py")
    assert done.returncode == 0, done.stderr
    assert command.rankwise("show", "runs").returncode == 0
    page = _written(command.folder)
    assert _marks(page, "placement") == 2
    assert "2.42 KiB" in page


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("nowhere",), "'nowhere' is not a checkpoint, a folder of a report or a mesh such as dp_shard=4,tp=2."),
        (("dp=4",), "'dp=4' is not the size of an axis."),
        (("tp=2,tp=2",), "'tp=2' is not the size of an axis."),
        (("tp=0",), "'tp=0' is not the size of an axis."),
        (("tp=4", "--ranks-per-host", "3"), "4 ranks do not fill hosts with 3 each."),
        (("tp=4", "--ranks-per-host", "0"), "4 ranks do not fill hosts with 0 each."),
        (("tp=2", "-o", "no/page.html"), "no/page.html cannot be written"),
        ((".",), "'.' is not a checkpoint, a folder of a report or a mesh such as dp_shard=4,tp=2."),
    ],
)
def test_what_cannot_be_shown_is_said(command: Command, words: tuple[str, ...], told: str) -> None:
    done = command.rankwise("show", *words)
    assert done.returncode == 2
    assert told in done.stderr
