# SPDX-License-Identifier: Apache-2.0
"""Damaged checkpoints are skipped, and reported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from listing import names

from rankwise.checkpoint.checkpointer import Checkpointer
from rankwise.checkpoint.load import load
from rankwise.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("world_of_one")


def _two(tmp_path: Path) -> tuple[Checkpointer, Path]:
    checkpoints = Checkpointer(tmp_path)
    checkpoints.save(extra={"n": 1, "t": torch.ones(5)})
    return checkpoints, checkpoints.save(extra={"n": 2, "t": torch.ones(40)})


def _expect_passed_over(checkpoints: Checkpointer, path: Path, caplog: pytest.LogCaptureFixture) -> str:
    caplog.clear()
    extra: dict[str, Any] = {}
    assert checkpoints.restore(extra=extra) == path.with_name("checkpoint-000001")
    assert extra["n"] == 1
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load(path, extra={})
    assert f"skipping {path}: " in caplog.text
    return caplog.text


@pytest.mark.parametrize("name", ["manifest.json", "part-00000.safetensors"])
def test_a_checkpoint_with_a_flipped_bit_anywhere_is_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    checkpoints, path = _two(tmp_path)
    data = (path / name).read_bytes()
    for place in [*range(0, len(data), 23), len(data) - 1]:
        altered = bytearray(data)
        altered[place] ^= 1 << place % 8
        (path / name).write_bytes(altered)
        assert name in _expect_passed_over(checkpoints, path, caplog)
    (path / name).write_bytes(data)
    assert Checkpointer(tmp_path).restore(extra={}) == path


@pytest.mark.parametrize("name", ["manifest.json", "part-00000.safetensors"])
def test_a_checkpoint_with_a_truncated_file_is_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    checkpoints, path = _two(tmp_path)
    data = (path / name).read_bytes()
    for length in (0, 1, 8, 60, len(data) // 2, len(data) - 1):
        (path / name).write_bytes(data[:length])
        said = _expect_passed_over(checkpoints, path, caplog)
        assert name in said
        if name != "manifest.json":
            assert f"{len(data)} bytes expected, {length} found" in said
    (path / name).unlink()
    assert f"{name} is missing" in _expect_passed_over(checkpoints, path, caplog)


def test_a_skipped_checkpoint_is_neither_the_latest_nor_kept(tmp_path: Path) -> None:
    _, path = _two(tmp_path)
    part = path / "part-00000.safetensors"
    data = part.read_bytes()
    part.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    resumed = Checkpointer(tmp_path, keep=2)
    good = path.with_name("checkpoint-000001")
    assert resumed.restore(extra={}) == good
    assert resumed.latest() == good
    resumed.save(extra={"n": 3})
    assert names(tmp_path) == ["checkpoint-000001", "checkpoint-000002", "checkpoint-000003"]
    resumed.save(extra={"n": 4})
    assert names(tmp_path) == ["checkpoint-000003", "checkpoint-000004"]


def test_without_a_good_checkpoint_it_is_an_error(tmp_path: Path) -> None:
    checkpoints, path = _two(tmp_path)
    for each in tmp_path.glob("checkpoint-*"):
        (each / "manifest.json").unlink()
    extra = {"n": 0}
    with pytest.raises(CheckpointError, match="holds checkpoints, and all are damaged"):
        checkpoints.restore(extra=extra)
    assert extra == {"n": 0}
    assert checkpoints.save(extra=extra).name == "checkpoint-000003"
    assert path.exists()
