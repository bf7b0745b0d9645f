# SPDX-License-Identifier: Apache-2.0
"""Real ranks over every exchange there is."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rankwise import testing

if TYPE_CHECKING:
    from on_ranks import RunRanks


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run one case of each test over Gloo, and all cases where the test is marked ``every_exchange``.

    Gloo takes four times as long as shared memory where ranks share cores.
    """
    over_gloo = [item for item in items if _is_over_gloo(item) and item.get_closest_marker("every_exchange") is None]
    # Whatever order the items are in, the same.
    last = {item.nodeid.partition("[")[0]: item for item in sorted(over_gloo, key=lambda item: item.nodeid)}
    left_out = set(over_gloo) - set(last.values())
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def _is_over_gloo(item: pytest.Item) -> bool:
    if item.path.parent != Path(__file__).parent or not hasattr(item, "callspec"):
        return False
    return any(isinstance(value, str) and value == "gloo" for value in item.callspec.params.values())


@pytest.fixture(params=["shared_memory", "gloo"])
def run_ranks(request: pytest.FixtureRequest) -> RunRanks:
    """Return ``rankwise.testing.run_ranks`` over each exchange: what ranks compute must not depend on it.

    Where the outcome cannot (an argument that is refused before anything is sent), call the plain function.
    """
    return partial(testing.run_ranks, exchange=request.param)
