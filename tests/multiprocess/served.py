# SPDX-License-Identifier: Apache-2.0
"""How tests run something on rank zero whose calls of modules are split, while the other ranks serve."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from rankwise.auto import calls as split_calls
from rankwise.auto import connection
from rankwise.auto.calls import SplitCalls
from rankwise.auto.connection import accept_servers, connect
from rankwise.auto.module_calls import ModuleCalls
from rankwise.auto.replacing import HeldSignals, one_by_one
from rankwise.auto.row_server import RowServer
from rankwise.auto.rows import OwnCalls
from rankwise.auto.servers import Servers
from rankwise.comm.session import current

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.world.facts import World


@dataclass
class Run:
    """What a function did on rank zero."""

    value: Any = None
    num_split: int = 0
    """Calls that ran on each rank's rows only."""
    num_proved: int = 0
    reasons: list[str] = field(default_factory=list)
    """Why calls ran whole, as the log says it."""
    num_graphs: int = 0
    """On a server at the end: calls that a backward may follow."""
    num_tensors: int = 0
    """On a server at the end."""


class CountedCalls(SplitCalls):
    """Counts, and splits where that saves no time too."""

    def __init__(self, servers: Servers, calls: ModuleCalls) -> None:
        super().__init__(servers, calls, HeldSignals(), torch.device("cpu"), splits_always=True)
        self.run = Run()

    def _proved(self, *args: Any, **kwargs: Any) -> Any:
        self.run.num_proved += 1
        return super()._proved(*args, **kwargs)

    def _rows_computed(self, *args: Any, **kwargs: Any) -> Any:
        self.run.num_split += 1
        return super()._rows_computed(*args, **kwargs)


def served(world: World, function: Callable[..., Any], *args: Any, is_shared: bool = True) -> Run:
    """Run a function with split calls on rank zero. Called by: every rank.

    ``is_shared``: whether the ranks find that they share memory, as on one host.
    """
    session = current()
    exchange, store, detector = session.exchange, session.store, session.detector
    assert exchange is not None
    assert store is not None
    assert detector is not None
    calls = ModuleCalls(exchange)
    own = OwnCalls(session, exchange, calls)
    with nullcontext() if is_shared else mock.patch.object(connection, "SharedBytes", side_effect=OSError):
        if world.rank:
            server = RowServer(connect(session, store, detector), exchange, own, torch.device("cpu"))
            with calls.replacing(calls.plain):
                assert server.serve()
            return Run(num_graphs=len(server._graphs), num_tensors=len(server._tensors._tensors))
        with Servers(accept_servers(session, store, detector), exchange, own) as servers:
            assert servers.share_memory == is_shared
            split = CountedCalls(servers, calls)
            log = mock.patch.object(split_calls, "log", split.run.reasons.append)
            with ExitStack() as stack:
                for one in (log, one_by_one(), split.replacing()):
                    stack.enter_context(one)
                split.run.value = function(*args)
            return split.run
