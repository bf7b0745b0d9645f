# SPDX-License-Identifier: Apache-2.0
"""Ranks killed with SIGKILL at every point of a save: checkpoints are complete, and saving continues."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from rankwise.checkpoint import files, folder, folder_lock, manifest
from rankwise.checkpoint import save as saving
from rankwise.checkpoint.checkpointer import Checkpointer
from rankwise.comm.collectives import all_gather_object
from rankwise.errors import RankwiseError
from rankwise.testing import RankDied, kill_self, run_ranks

if TYPE_CHECKING:
    from rankwise.world.facts import World

STAGES = list(saving.STAGES)


def _state(number: int) -> dict[str, Any]:
    return {
        "n": number,
        "a": torch.full((50_000,), float(number)),
        "b": torch.full((50_001,), float(number)),
    }


Die = Callable[[], None]


def _before(stage: str) -> Callable[[Die], None]:
    def arm(die: Die) -> None:
        saving.STAGES[stage] = lambda _: die()

    return arm


def _after(stage: str) -> Callable[[Die], None]:
    def arm(die: Die) -> None:
        work = saving.STAGES[stage]

        def then_die(job: saving.SaveJob) -> None:
            work(job)
            die()

        saving.STAGES[stage] = then_die

    return arm


def _amid_the_tensors(die: Die) -> None:
    whole_parts = saving.SaveJob.parts

    def half(job: saving.SaveJob) -> Any:
        for part in map(memoryview, whole_parts(job)):
            yield part[: len(part) // 2]
            if len(part) > 100_000:
                die()
            yield part[len(part) // 2 :]

    saving.SaveJob.parts = half  # type: ignore[method-assign]


def _before_the_tensors_are_on_disk(die: Die) -> None:
    fsync = os.fsync

    def hooked(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink().suffix == ".safetensors":
            die()
        fsync(descriptor)

    os.fsync = hooked


def _amid_the_manifest(die: Die) -> None:
    write_file = files.write_file

    def half(path: Path, parts: Any) -> Any:
        if path.name == manifest.MANIFEST_NAME:
            data = b"".join(parts)
            path.write_bytes(data[: len(data) // 2])
            die()
        return write_file(path, parts)

    files.write_file = half


def _amid_replacing(die: Die) -> None:
    rename = Path.rename

    def hooked(self: Path, target: Path) -> Path:
        result = rename(self, target)
        if ".replaced-" in target.name:
            die()
        return result

    Path.rename = hooked  # type: ignore[method-assign]


def _before_the_commit(die: Die) -> None:
    folder.commit = lambda *_: die()  # type: ignore[assignment]


def _after_the_commit(die: Die) -> None:
    commit = folder.commit

    def then_die(staging: Path, target: Path, token: str) -> None:
        commit(staging, target, token)
        die()

    folder.commit = then_die


def _between_the_rename_and_the_disk(die: Die) -> None:
    sync = folder.sync

    def hooked(path: Path) -> None:
        if not path.name.startswith("."):
            die()
        sync(path)

    folder.sync = hooked


def _amid_removing_an_old_one(die: Die) -> None:
    rmtree = shutil.rmtree

    def hooked(path: Path, **options: Any) -> None:
        if ".removed-" in path.name:
            (path / manifest.MANIFEST_NAME).unlink()
            die()
        rmtree(path, **options)

    shutil.rmtree = hooked  # type: ignore[assignment]


POINTS: dict[str, Callable[[Die], None]] = {
    **{f"before {stage}": _before(stage) for stage in STAGES},
    **{f"after {stage}": _after(stage) for stage in STAGES},
    "amid the tensors": _amid_the_tensors,
    "before the tensors are on disk": _before_the_tensors_are_on_disk,
    "amid the manifest": _amid_the_manifest,
    "before the commit": _before_the_commit,
    "amid replacing": _amid_replacing,
    "between the rename and the disk": _between_the_rename_and_the_disk,
    "after the commit": _after_the_commit,
    "amid removing an old one": _amid_removing_an_old_one,
}
RANK_ZERO_ONLY = list(POINTS)[-6:]
COMMITTED = {
    "between the rename and the disk",
    "after the commit",
    "amid removing an old one",
    "after completing",
}
CASES = [(point, 0) for point in POINTS] + [(point, 1) for point in POINTS if point not in RANK_ZERO_ONLY]


def _save_and_be_killed(world: World, path: str, point: str, victim: int, asynchronous: bool) -> None:
    pids = all_gather_object(os.getpid())
    checkpoints = Checkpointer(path, keep=2, asynchronous=asynchronous)
    for number in (1, 2):
        checkpoints.save(extra=_state(number))
    checkpoints.wait()

    def die() -> None:
        # The launcher, or the machine's end, takes the others along.
        for rank, pid in enumerate(pids):
            if rank != world.rank:
                os.kill(pid, signal.SIGKILL)
        kill_self()

    if world.rank == victim:
        POINTS[point](die)
    step = 2 if point == "amid replacing" else None
    checkpoints.save(step=step, extra=_state(3))
    checkpoints.wait()


def _restore_and_save(world: World, path: str) -> tuple[int, list[str]]:
    extra: dict[str, Any] = {}
    checkpoints = Checkpointer(path, keep=2)
    assert checkpoints.restore(extra=extra) is not None
    number = extra["n"]
    assert all(extra[key].eq(number).all() for key in ("a", "b"))
    checkpoints.save(extra=_state(9))
    assert checkpoints.restore(extra=extra) is not None
    assert extra["n"] == 9
    del world
    return number, sorted(entry.name for entry in checkpoints.directory.iterdir())


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize(("point", "victim"), CASES)
def test_a_job_killed_amid_a_save_loses_at_most_that_save(
    tmp_path: Path, point: str, victim: int, asynchronous: bool
) -> None:
    results = run_ranks(_save_and_be_killed, 2, str(tmp_path), point, victim, asynchronous)
    assert all(isinstance(result.error, RankDied) for result in results)
    assert {result.exit_code for result in results} == {-9}

    number, left = run_ranks(_restore_and_save, 1, str(tmp_path))[0].get()
    if victim == 1 and point.endswith("completing"):
        # The other rank may have been killed before or after its rename.
        assert number in {2, 3}
    else:
        assert number == (3 if point in COMMITTED else 2)
    # The lock of the killed job has made way for the next one's.
    assert [name.startswith(folder.PREFIX) for name in left] == [False, True, True]
    assert left[0] == f"{folder_lock.PREFIX}2"


def _survive(world: World, path: str, stage: str, victim: int, asynchronous: bool) -> str:
    checkpoints = Checkpointer(path, asynchronous=asynchronous)
    checkpoints.save(extra=_state(1))
    checkpoints.wait()
    if world.rank == victim:
        _before(stage)(kill_self)
    try:
        checkpoints.save(extra=_state(2))
        checkpoints.wait()
    except RankwiseError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("victim", [0, 1])
def test_the_rank_that_is_left_gets_an_error_that_names_the_dead_one(
    tmp_path: Path, victim: int, asynchronous: bool
) -> None:
    results = run_ranks(_survive, 2, str(tmp_path), "writing the tensors of", victim, asynchronous)
    assert isinstance(results[victim].error, RankDied)
    assert f"rank {victim} exited without reporting an error" in results[1 - victim].get()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(folder.PREFIX)] == ["checkpoint-000001"]
    assert run_ranks(_restore_and_save, 1, str(tmp_path))[0].get()[0] == 1
