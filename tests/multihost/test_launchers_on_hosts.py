# SPDX-License-Identifier: Apache-2.0
"""Launchers on hosts whose own name means loopback to them, as Debian writes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import elastic_training
import pytest
from hosts import Hosts
from launched_job import Job

import rankwise as rw

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(2, own_name_is_loopback=True) as made:
        yield made


def test_the_way_to_the_rendezvous_is_taken_whatever_the_name_means(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    with rw.join() as world:
        expected = elastic_training.train(world, tmp_path / "one", "nothing")
    job = Job(hosts, tmp_path, "nothing", "--nodes", "2")
    job.start(1)
    job.start(0)
    assert [job.exit_code(0), job.exit_code(1)] == [0, 0], job.said()
    job.check(expected, [(0, 4)])


def test_a_rendezvous_by_a_name_that_means_loopback_is_an_error(hosts: Hosts, tmp_path: Path) -> None:
    job = Job(hosts, tmp_path, "nothing", "--nodes", "2", rendezvous="host0")
    job.start(0)
    assert job.exit_code(0) == 2, job.said()
    assert "host0 means this machine itself, and other machines have to reach it" in job.said()
    assert hosts.addresses[0] in job.said()
