# SPDX-License-Identifier: Apache-2.0
"""Slurm's own ways of writing: host lists, tasks per node, the port of a step."""

from __future__ import annotations

import pytest
from launcher_variables import SLURM

from rankwise.errors import ConfigurationError
from rankwise.world.environments import slurm
from rankwise.world.environments.reading import parse_counts
from rankwise.world.environments.slurm import hosts
from rankwise.world.environments.table import read


def test_the_user_s_address_goes_before_slurm_s() -> None:
    assert read({**SLURM, "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "4000"}).address == (
        "10.0.0.7",
        4000,
    )
    assert read({**SLURM, "MASTER_PORT": "4000"}).address == ("gpu07", 4000)
    assert read({**SLURM, "MASTER_ADDR": "10.0.0.7"}).address == (
        "10.0.0.7",
        slurm.step_port(12, 3),
    )


def test_a_requeued_job_is_another_attempt() -> None:
    first, second = read(SLURM), read({**SLURM, "SLURM_RESTART_COUNT": "1"})
    assert (first.attempt, second.attempt) == ("0", "1")
    assert first.job_key != second.job_key


@pytest.mark.parametrize("step", [0, 7, 4294967290])
def test_the_port_of_a_step_is_in_the_documented_range(step: int) -> None:
    assert 20000 <= slurm.step_port(123456, step) <= 29999
    assert slurm.step_port(123456, step) != slurm.step_port(123456, step + 1)
    assert slurm.step_port(123456, step) != slurm.step_port(123457, step)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("n1", ["n1"]),
        ("gpu[001-003,7],login1", ["gpu001", "gpu002", "gpu003", "gpu7", "login1"]),
        ("n[08-10]", ["n08", "n09", "n10"]),
        ("r[1-2]n[1,3]-ib", ["r1n1-ib", "r1n3-ib", "r2n1-ib", "r2n3-ib"]),
        ("a,b[2]", ["a", "b2"]),
    ],
)
def test_host_lists(text: str, expected: list[str]) -> None:
    assert list(hosts(text)) == expected


@pytest.mark.parametrize("text", ["", "n[1-3", "n1-3]", "n[]", "n[3-1]", "n[a-b]", "a,,b", ",a", "n[[1]]"])
def test_a_bad_host_list_is_an_error(text: str) -> None:
    with pytest.raises(ConfigurationError, match="not a Slurm list"):
        list(hosts(text))


def test_a_long_host_list_costs_nothing_until_it_is_read() -> None:
    assert next(hosts("n[1-999999999999]")) == "n1"


def test_tasks_per_node() -> None:
    assert parse_counts("2(x3),1", "NAME") == [2, 2, 2, 1]
    with pytest.raises(ConfigurationError, match="cannot be parsed"):
        parse_counts("2(x)", "NAME")
