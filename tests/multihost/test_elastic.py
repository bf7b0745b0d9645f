# SPDX-License-Identifier: Apache-2.0
"""Jobs on two hosts of two ranks that are hurt in the middle, and end with the parameters of the undisturbed run."""

from __future__ import annotations

import select
import signal
from typing import TYPE_CHECKING

import elastic_training
import pytest
from hosts import Hosts
from launched_job import Job

import rankwise as rw

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import torch

    from tests.warm import WarmPython

CUT_SECONDS = 3.0


@pytest.fixture(scope="module")
def hosts(warm_python: WarmPython) -> Iterator[Hosts]:
    with Hosts(2, python=warm_python) as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    with rw.join() as world:
        return elastic_training.train(world, tmp_path_factory.mktemp("undisturbed"), "nothing")


@pytest.mark.parametrize("what", ["kill", "stop"])
def test_a_rank_that_dies_or_stops_is_replaced(
    hosts: Hosts, tmp_path: Path, undisturbed: dict[str, torch.Tensor], what: str
) -> None:
    job = Job(hosts, tmp_path, what, "--nodes", "2", "--max-restarts", "1")
    job.start(0)
    job.start(1)
    assert [job.exit_code(0), job.exit_code(1)] == [0, 0], job.said()
    job.check(undisturbed, [(0, 4), (1, 4)])


@pytest.mark.parametrize("way", ["launcher", "cable"])
def test_a_job_continues_without_a_lost_node_and_readmits_it(
    hosts: Hosts, tmp_path: Path, undisturbed: dict[str, torch.Tensor], way: str
) -> None:
    job = Job(hosts, tmp_path, "wait", "--nodes", "1:2")
    job.start(0)
    job.start(1)
    job.wait_for("reached")
    if way == "cable":
        hosts.link(1, up=False)
    else:
        job.launchers[1].send_signal(signal.SIGKILL)
    try:
        job.wait_until(lambda: any(attempt == 1 for attempt, *_ in job.steps()))
    finally:
        hosts.link(1, up=True)
    if way != "cable":
        job.start(1)
    job.wait_until(lambda: "the ranks save at their next step" in job.said())
    (tmp_path / "go").touch()
    assert [job.exit_code(0), job.exit_code(1)] == [0, 0], job.said()
    job.check(undisturbed, [(0, 4), (1, 2), (2, 4)])


def test_a_cut_of_a_few_seconds_simply_resumes(
    hosts: Hosts, tmp_path: Path, undisturbed: dict[str, torch.Tensor]
) -> None:
    job = Job(hosts, tmp_path, "wait", "--nodes", "2")
    job.start(0)
    job.start(1)
    job.wait_for("reached")
    hosts.link(1, up=False)
    try:
        (tmp_path / "go").touch()
        # No sign of life crosses the cable for that long.
        assert not select.select([], [], [], CUT_SECONDS)[0]
    finally:
        hosts.link(1, up=True)
    assert [job.exit_code(0), job.exit_code(1)] == [0, 0], job.said()
    job.check(undisturbed, [(0, 4)])
