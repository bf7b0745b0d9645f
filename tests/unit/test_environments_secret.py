# SPDX-License-Identifier: Apache-2.0
"""The job's secret: read beside every launcher, and never shown."""

from __future__ import annotations

import pytest
from launcher_variables import HYDRA, OPENMPI, OWN, PLAIN, SLURM, TORCHRUN

from rankwise.errors import ConfigurationError
from rankwise.world.environments.process import reading_of_arguments
from rankwise.world.environments.table import read

SECRET = "correct horse battery staple"  # noqa: S105 - of no job


@pytest.mark.parametrize("around", [PLAIN, OPENMPI, HYDRA, SLURM, OWN, {"PMI_RANK": "0", "PMI_SIZE": "1"}])
def test_the_secret_is_read_beside_every_launcher_that_leaves_the_store_to_us(around: dict[str, str]) -> None:
    around = {"MASTER_ADDR": "gpu-07", "MASTER_PORT": "29500", **around}
    assert read({**around, "RANKWISE_SECRET": SECRET}).secret == SECRET
    assert read(around).secret is None


@pytest.mark.parametrize("empty", ["", " \n"])
def test_an_empty_secret_is_refused(empty: str) -> None:
    # As where a command that was to print it has failed: the job would run without one.
    with pytest.raises(ConfigurationError, match="RANKWISE_SECRET is set but empty"):
        read({**PLAIN, "RANKWISE_SECRET": empty})


def test_torchruns_own_store_has_no_secret() -> None:
    assert read({**TORCHRUN, "RANKWISE_SECRET": SECRET}).secret is None


def test_the_secret_is_read_beside_an_explicit_address() -> None:
    reading = reading_of_arguments("tcp://gpu-01:29500", 0, 2, variables={"RANKWISE_SECRET": SECRET})
    assert reading.secret == SECRET
    assert reading_of_arguments("env://", None, None, variables={**PLAIN, "RANKWISE_SECRET": SECRET}).secret == SECRET


@pytest.mark.parametrize("around", [PLAIN, TORCHRUN, OPENMPI, HYDRA, SLURM, OWN])
@pytest.mark.parametrize("wrong", [{}, {"RANK": "x"}, {"WORLD_SIZE": "0"}, {"MASTER_PORT": "x"}, {"RANK": "7"}])
def test_the_secret_is_never_shown(around: dict[str, str], wrong: dict[str, str]) -> None:
    variables = {**around, **wrong, "RANKWISE_SECRET": SECRET}
    try:
        reading = read(variables)
    except ConfigurationError as error:
        assert SECRET not in f"{error} {error!r}"
    else:
        assert SECRET not in f"{reading} {reading!r} {reading.reason}"
