# SPDX-License-Identifier: Apache-2.0
"""What tests of one process ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rankwise.process_group import join, leave

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def world_of_one() -> Iterator[None]:
    """A world that this process has joined alone, left after the test."""
    join(device="cpu")
    yield
    leave()
