# SPDX-License-Identifier: Apache-2.0
"""The comparison of two runs of a script notices each difference that counts, and no other."""

from __future__ import annotations

import contextlib
import sqlite3
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.same_result import Result, differences

if TYPE_CHECKING:
    from pathlib import Path

OUTPUT = "epoch 1: loss 0.123456789012, accuracy 17/20\nlr 1e-3 nan -2.5\n"


def _run(folder: Path, stdout: str = OUTPUT, code: int = 0, **files: Any) -> Result:
    folder.mkdir()
    for name, content in files.items():
        if isinstance(content, str):
            (folder / f"{name}.txt").write_text(content, encoding="utf-8")
        elif isinstance(content, np.ndarray):
            np.save(folder / f"{name}.npy", content)
        else:
            torch.save(content, folder / f"{name}.pt")
    return Result(code, stdout, folder)


@pytest.mark.parametrize(
    "stdout",
    [
        OUTPUT.replace("789012", "789013"),
        OUTPUT.replace("-2.5", "-2.50000000001"),
        OUTPUT.replace("1e-3", "0.001"),
    ],
)
def test_numbers_within_the_tolerance_are_the_same(tmp_path: Path, stdout: str) -> None:
    assert differences(_run(tmp_path / "a"), _run(tmp_path / "b", stdout)) == []


@pytest.mark.parametrize(
    "stdout",
    [
        OUTPUT.replace("0.123456789012", "0.123456790247"),  # 1e-8 of it
        OUTPUT.replace("17/20", "18/20"),
        OUTPUT.replace("-2.5", "2.5"),
        OUTPUT.replace("nan", "0.0"),
        OUTPUT.replace("loss", "Loss"),
        OUTPUT.splitlines()[0] + "\n",
        OUTPUT + "one more\n",
        OUTPUT.replace("\nlr", "\n\nlr"),
        "",
    ],
)
def test_what_a_run_prints_differs(tmp_path: Path, stdout: str) -> None:
    assert differences(_run(tmp_path / "a"), _run(tmp_path / "b", stdout))


def test_an_exit_code_differs(tmp_path: Path) -> None:
    assert differences(_run(tmp_path / "a"), _run(tmp_path / "b", code=1)) == ["exit code: 0 and 1"]


def test_files_and_folders_differ(tmp_path: Path) -> None:
    one, other = _run(tmp_path / "a", log="x"), _run(tmp_path / "b")
    assert differences(one, other) == ["log.txt: missing"]
    assert differences(other, one) == ["log.txt: not written by the first run"]
    (other.folder / "log.txt").mkdir()
    assert differences(one, other) == ["log.txt: a folder and a file"]


def test_texts_in_files_are_compared_by_their_numbers(tmp_path: Path) -> None:
    one = _run(tmp_path / "a", log="2026-01-01 10:00:00,123 INFO loss 0.5\n")
    assert differences(one, _run(tmp_path / "b", log="2026-01-01 10:00:07,001 INFO loss 0.50000000000001\n")) == []
    (line,) = differences(one, _run(tmp_path / "c", log="2026-01-01 10:00:00,123 INFO loss 0.500000005\n"))
    assert line.startswith("log.txt, line 1: ")


def test_times_in_names_are_left_out_and_folders_still_counted(tmp_path: Path) -> None:
    one, other = _run(tmp_path / "a"), _run(tmp_path / "b")
    (one.folder / "run-20260101-120000").mkdir()
    (other.folder / "run-20260101-120007").mkdir()
    assert differences(one, other) == []
    (other.folder / "run-20260101-120008").mkdir()
    assert differences(one, other) == ["run-TIME~: not written by the first run"]


def test_databases_and_archives_are_compared_by_what_they_hold(tmp_path: Path) -> None:
    one, same, other = (_run(tmp_path / name) for name in "abc")
    for run, loss, time in (one, 0.5, 1980), (same, 0.50000000000001, 1990), (other, 0.500000005, 1980):
        with contextlib.closing(sqlite3.connect(run.folder / "runs.db")) as database:
            database.execute("create table runs (loss real)")
            database.execute("insert into runs values (?)", [loss])
            database.commit()
        with zipfile.ZipFile(run.folder / "files.zip", "w") as archive:
            archive.writestr(zipfile.ZipInfo("a.txt", (time, 1, 1, 0, 0, 0)), "x" if run is not other else "y")
    assert differences(one, same) == []
    assert [line.partition(",")[0] for line in differences(one, other)] == ["files.zip", "runs.db"]


class _Own:
    def __init__(self, value: float) -> None:
        self.value = value


def _state(weight: torch.Tensor, **more: Any) -> dict[str, Any]:
    return {"model": {"weight": weight}, "epoch": 3, "history": [0.25, (1, 2)], "rng": torch.arange(5), **more}


WEIGHT = torch.linspace(-3, 3, 7, dtype=torch.float64)


@pytest.mark.parametrize(
    "other",
    [_state(WEIGHT * (1 + 1e-12)), _state(WEIGHT + 1e-11), _state(WEIGHT, history=[0.25 + 1e-14, (1, 2)])],
)
def test_tensors_within_the_tolerance_are_the_same(tmp_path: Path, other: Any) -> None:
    assert differences(_run(tmp_path / "a", ckpt=_state(WEIGHT)), _run(tmp_path / "b", ckpt=other)) == []


@pytest.mark.parametrize(
    ("other", "where"),
    [
        (_state(WEIGHT * (1 + 1e-8)), "content['model']['weight']"),
        (_state(WEIGHT.float()), "content['model']['weight']"),
        (_state(WEIGHT[:6]), "content['model']['weight']"),
        (_state(torch.where(WEIGHT == 0, torch.nan, WEIGHT)), "content['model']['weight']"),
        (_state(WEIGHT, epoch=4), "content['epoch']"),
        (_state(WEIGHT, history=[0.25 + 1e-8, (1, 2)]), "content['history'][0]"),
        (_state(WEIGHT, history=[0.25, (1, 2), 3]), "content['history']"),
        (_state(WEIGHT, rng=torch.tensor([0, 1, 2, 3, 5])), "content['rng']"),
        (_state(WEIGHT, more=1), "content"),
        (WEIGHT, "content"),
    ],
)
def test_a_tensor_or_a_value_in_a_checkpoint_differs(tmp_path: Path, other: Any, where: str) -> None:
    (line,) = differences(_run(tmp_path / "a", ckpt=_state(WEIGHT)), _run(tmp_path / "b", ckpt=other))
    assert line.startswith(f"ckpt.pt, {where}: ")


def test_whole_models_and_objects_differ(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    model.append(torch.nn.LSTM(2, 1))
    one = _run(tmp_path / "a", model=model, own=_Own(0.5))
    assert differences(one, _run(tmp_path / "b", model=model, own=_Own(0.5 + 1e-14))) == []
    assert len(differences(one, _run(tmp_path / "c", model=model.eval(), own=_Own(0.6)))) == 5


def test_arrays_differ(tmp_path: Path) -> None:
    one = _run(tmp_path / "a", found=WEIGHT.numpy())
    assert differences(one, _run(tmp_path / "b", found=WEIGHT.numpy() + 1e-12)) == []
    assert differences(one, _run(tmp_path / "c", found=WEIGHT.numpy() + 1e-8))
