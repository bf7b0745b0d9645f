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

    from tests.warm import WarmPython


@pytest.fixture(scope="module")
def hosts(warm_python: WarmPython) -> Iterator[Hosts]:
    with Hosts(2, own_name_is_loopback=True, python=warm_python) as made:
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


@pytest.mark.parametrize("way", ["own name", "pods"])
def test_a_first_machine_that_is_loopback_to_itself_serves_the_others(hosts: Hosts, tmp_path: Path, way: str) -> None:
    job = Job(hosts, tmp_path, "nothing", "--nodes", "2", rendezvous="host0")
    if way == "pods":
        # As operators of Kubernetes tell their pods.
        job.words = job.words[4:]
        for host, address in enumerate(("localhost", hosts.addresses[0])):
            job.env[host] = {
                "MASTER_ADDR": address,
                "MASTER_PORT": "29400",
                "RANK": str(host),
                "WORLD_SIZE": "2",
            }
    job.start(0)
    job.start(1)
    assert [job.exit_code(0), job.exit_code(1)] == [0, 0], job.said()
    assert "listening on every interface" in job.said()
    assert {int(size) for _, size, _, _ in job.steps()} == {4}


def test_a_launcher_listens_on_one_address(hosts: Hosts, tmp_path: Path) -> None:
    job = Job(hosts, tmp_path, "wait", "--nodes", "2")
    job.start(0)
    job.start(1)
    job.wait_for("reached")
    with (tmp_path / "listening").open("w", encoding="utf-8") as file:
        assert hosts.start(0, ["ss", "-Htln", "sport = :29400"], stdout=file).wait(10) == 0
    (tmp_path / "go").touch()
    assert [job.exit_code(0), job.exit_code(1)] == [0, 0], job.said()
    listening = (tmp_path / "listening").read_text(encoding="utf-8").splitlines()
    assert [line.split()[3] for line in listening] == [f"{hosts.addresses[0]}:29400"]


def test_a_rendezvous_that_means_loopback_and_is_another_machine_is_an_error(hosts: Hosts, tmp_path: Path) -> None:
    job = Job(hosts, tmp_path, "nothing", "--nodes", "2", rendezvous="host0")
    job.words[job.words.index("--nodes") : job.words.index("--nodes")] = ["--node-rank", "1"]
    job.start(0)
    assert job.exit_code(0) == 2, job.said()
    assert "host0 resolves to this machine itself, but other machines must reach it" in job.said()
    assert hosts.addresses[0] in job.said()
