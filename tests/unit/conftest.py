# SPDX-License-Identifier: Apache-2.0
"""What tests of one process ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import settings

from rankwise.comm import session
from rankwise.comm.join import join
from rankwise.comm.leave import leave
from rankwise.comm.session import Session
from rankwise.world.facts import World

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.warm import WarmPython

# How long an example takes says how busy the machine is.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")


@pytest.fixture
def world_of_one() -> Iterator[None]:
    """A world that this process has joined alone, left after the test."""
    join(device="cpu")
    yield
    leave()


@pytest.fixture
def alone() -> Iterator[None]:
    """A world of one as a value: nothing is joined."""
    world = World(
        rank=0,
        world_size=1,
        local_rank=0,
        local_world_size=1,
        node_rank=0,
        num_nodes=1,
        device="cpu",
        backend="none",
        hostname="here",
        source="nobody",
    )
    session.set_current(Session(world=world))
    yield
    session.set_current(None)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Every fetching thread would otherwise start threads of its own on a machine with other work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def torch_python() -> Iterator[WarmPython]:
    """A process that has imported torch and nothing of rankwise, and fails on warnings: programs are forked from it."""
    from tests.warm import WarmPython, variables

    ours = WarmPython(variables(), module="torch", options=("-W", "error"))
    yield ours
    ours.close()
