# SPDX-License-Identifier: Apache-2.0
"""Hosts to run ranks on. Where they cannot be made, the error says what the machine lacks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hosts import Hosts

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Two hosts, gone after the test with all that runs on them."""
    with Hosts(2) as made:
        yield made
