# SPDX-License-Identifier: Apache-2.0
"""Real ranks over every exchange there is."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest

from rankwise import testing

if TYPE_CHECKING:
    from on_ranks import RunRanks


@pytest.fixture(params=["shared_memory", "gloo"])
def run_ranks(request: pytest.FixtureRequest) -> RunRanks:
    """Return ``rankwise.testing.run_ranks`` over each exchange: what ranks compute must not depend on it.

    Where the outcome cannot (an argument that is refused before anything is sent), call the plain function.
    """
    return partial(testing.run_ranks, exchange=request.param)
