# SPDX-License-Identifier: Apache-2.0
"""Hosts to run ranks on. Where they cannot be made, the error says what the machine lacks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hosts import Hosts

from tests.warm import WarmPython, variables

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def warm_python() -> Iterator[WarmPython]:
    """The process that ranks on hosts are forked from, with one thread each."""
    ours = WarmPython({**variables(), "OMP_NUM_THREADS": "1"})
    yield ours
    ours.close()


@pytest.fixture
def hosts(warm_python: WarmPython) -> Iterator[Hosts]:
    """Two hosts, gone after the test with all that runs on them."""
    with Hosts(2, python=warm_python) as made:
        yield made
