# SPDX-License-Identifier: Apache-2.0
"""Real ranks over every exchange there is."""

from __future__ import annotations

import multiprocessing
from functools import partial
from multiprocessing import forkserver
from typing import TYPE_CHECKING

import pytest

import rankwise
from rankwise import testing

if TYPE_CHECKING:
    from on_ranks import RunRanks


@pytest.fixture(scope="session", autouse=True)
def _what_ranks_import_is_there() -> None:
    """Start the process that ranks are forked from with what each would take a second to import for itself."""
    # torch imports its compiler when an optimizer first steps.
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        [
            "rankwise.testing",
            "numpy",
            "pytest",
            "torch._dynamo",
            "torch.distributed.fsdp",
            "torch.distributed.pipelining",
            "torch.distributed.tensor.parallel",
            "rankwise.compat.horovod",
            "rankwise.compat.megengine",
            *sorted({f"rankwise.{module}" for module in rankwise._ROOM_OF.values()}),
        ]
    )
    forkserver.ensure_running()


@pytest.fixture(params=["shared_memory", "gloo"])
def run_ranks(request: pytest.FixtureRequest) -> RunRanks:
    """Return ``rankwise.testing.run_ranks`` over each exchange: what ranks compute must not depend on it.

    Where the outcome cannot (an argument that is refused before anything is sent), call the plain function.
    """
    return partial(testing.run_ranks, exchange=request.param)
