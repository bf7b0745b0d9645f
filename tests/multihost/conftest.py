# SPDX-License-Identifier: Apache-2.0
"""Hosts to run ranks on. Where they cannot be made, the error says what the machine lacks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hosts import Hosts
from slurm import Slurm

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.warm import WarmPython


@pytest.fixture
def hosts(warm_python: WarmPython) -> Iterator[Hosts]:
    """Two hosts, gone after the test with all that runs on them."""
    with Hosts(2, python=warm_python) as made:
        yield made


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    """A cluster of two nodes, for all tests: it takes a second to start."""
    with Slurm(2) as made:
        yield made
    assert not made.folder.exists()
