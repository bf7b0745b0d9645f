# SPDX-License-Identifier: Apache-2.0
"""Hosts to run ranks on. Where they cannot be made, the error says what the machine lacks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hosts import Hosts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.warm import WarmPython


@pytest.fixture
def hosts(warm_python: WarmPython) -> Iterator[Hosts]:
    """Two hosts, gone after the test with all that runs on them."""
    with Hosts(2, python=warm_python) as made:
        yield made
