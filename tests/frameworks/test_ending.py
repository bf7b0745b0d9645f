# SPDX-License-Identifier: Apache-2.0
"""Trainings by Lightning that cannot continue under ``rankwise run``: all ranks end, and the reason is named."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
from conftest import HERE, MOST_SECONDS, RANKWISE

if TYPE_CHECKING:
    from conftest import Launcher

INTERRUPTED = 130
ENDLESS = str(HERE / "scripts" / "lightning_endless.py")


@pytest.mark.parametrize("script", ["lightning_trainer", "lightning_fabric"])
def test_another_number_of_devices_than_ranks_is_an_error_with_both(launcher: Launcher, script: str) -> None:
    done = launcher.run(*RANKWISE, "2", str(HERE / "scripts" / f"{script}.py"), str(launcher.folder), "4")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ValueError: ")
    assert "`devices=4`" in last
    assert "world size (2)" in last
    assert not list(launcher.folder.iterdir()), "nothing was trained"


def test_an_error_on_one_rank_ends_all_and_is_shown_last(launcher: Launcher) -> None:
    done = launcher.run(*RANKWISE, "2", ENDLESS, "failing")
    assert done.returncode == 1
    assert "rank 1 of 2" in next(line for line in done.stderr.splitlines() if "failed first" in line)
    assert done.stderr.endswith("ValueError: the fourth batch is bad\n")


def test_ctrl_c_ends_all_ranks(launcher: Launcher) -> None:
    running = launcher.start(*RANKWISE, "2", ENDLESS, "endless")
    try:
        assert running.stdout is not None
        assert "an epoch is over" in running.stdout.readline()
        # As a terminal does it: everything in the foreground gets the signal.
        os.killpg(running.pid, signal.SIGINT)
        _, stderr = running.communicate(timeout=MOST_SECONDS)
    finally:
        running.kill()
        running.wait()
    assert running.returncode == INTERRUPTED, stderr
    assert "SIGINT" in stderr.splitlines()[-1]
