# SPDX-License-Identifier: Apache-2.0
"""An address that the script gives itself: ``init_method`` with rank and world size, or ``env://``."""

from __future__ import annotations

from typing import Any

import pytest
from launcher_variables import PLAIN, SLURM, TORCHRUN

from rankwise.errors import ConfigurationError
from rankwise.world.environments.process import reading_of_arguments


def test_explicit_addresses() -> None:
    reading = reading_of_arguments("tcp://gpu-01:29500", 1, 2, variables=SLURM)
    assert (reading.rank, reading.world_size, reading.address) == (1, 2, ("gpu-01", 29500))
    assert reading_of_arguments("tcp://[fd00::2]:29500", 0, 1, variables={}).address == ("fd00::2", 29500)
    assert reading_of_arguments("file:///shared/a%20job", 0, 3, variables={}).file == "/shared/a job"


@pytest.mark.parametrize(
    "init_method",
    [
        "",
        "gpu-01:29500",
        "tcp://gpu-01",
        "tcp://:29500",
        "tcp://gpu-01:port",
        "tcp://gpu-01:99999",
        "tcp://gpu-01:0",
        "tcp://gpu-01:29500/path",
        "tcp://gpu-01:29500?rank=0",
        "file://relative/path",
        "file:///",
        "env://host",
        "http://gpu-01:29500",
    ],
)
def test_bad_init_methods_are_refused_with_an_example(init_method: str) -> None:
    with pytest.raises(ConfigurationError, match=r"init_method|port") as caught:
        reading_of_arguments(init_method, 0, 2, variables={})
    assert "29500" in (caught.value.do or "")


@pytest.mark.parametrize(
    ("rank", "world_size", "text"),
    [
        (None, 2, "also needs rank"),
        (0, None, "also needs world_size"),
        (None, None, "also needs rank and world_size"),
        (2, 2, "rank=2 does not fit world_size=2"),
        (-1, 2, "rank=-1"),
        (0, 0, "world_size=0"),
        ("0", 2, "rank must be an int, got '0'"),
        (0, True, "world_size must be an int, got True"),
    ],
)
def test_explicit_addresses_need_good_numbers(rank: Any, world_size: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        reading_of_arguments("tcp://gpu-01:29500", rank, world_size, variables={})


def test_env_takes_the_variables_and_the_arguments_go_first() -> None:
    assert reading_of_arguments("env://", None, None, variables=PLAIN).rank == 1
    variables = {**PLAIN, "LOCAL_RANK": "1"}
    reading = reading_of_arguments("env://", 5, 8, variables=variables, argv=["train.py", "--local_rank=1"])
    assert (reading.rank, reading.world_size, reading.local_rank) == (5, 8, None)
    assert reading.address == ("job-master-0", 23456)
    assert "from the arguments" in reading.reason
    same = reading_of_arguments("env://", 1, 4, variables=variables)
    assert same.local_rank == 1


def test_env_under_torchrun_uses_the_store_that_is_served() -> None:
    variables = {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    reading = reading_of_arguments("env://", None, None, variables=variables)
    assert (reading.source, reading.store_is_served) == ("torchrun", True)


def test_env_ignores_what_the_user_did_not_name() -> None:
    assert reading_of_arguments("env://", None, None, variables={**SLURM, **PLAIN}).source == "env"


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({}, "RANK, WORLD_SIZE are not set"),
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, "cannot be found"),
        ({**PLAIN, "RANK": "9"}, "rank=9 does not fit world_size=4"),
    ],
)
def test_env_needs_a_complete_set(variables: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        reading_of_arguments("env://", None, None, variables=variables)
