# SPDX-License-Identifier: Apache-2.0
"""How workers of parameter servers end: aborted loops and steps, and calls after the world."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import rankwise as rw
from rankwise import testing
from rankwise.errors import NotJoined, PeerFailed

if TYPE_CHECKING:
    from rankwise.world.facts import World


def _build() -> tuple[nn.Linear, torch.optim.Optimizer, TensorDataset]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), TensorDataset(torch.randn(12, 3))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _breaks_off_a_step(world: World) -> None:
    model, optimizer, data = _build()
    server = rw.parameter_server(model, optimizer)
    if server._worker is not None and world.rank == 0:
        server._worker._put_in_place = _interrupt  # type: ignore[method-assign]
    for (x,) in rw.DataLoader(data, global_batch_size=4):
        _step(model, optimizer, x)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_rank_that_aborts_a_step_stops_waiting() -> None:
    # An error lets go of the loop over the loader, as break does, before anybody hears of it.
    results = testing.run_ranks(_breaks_off_a_step, 3, join_timeout_seconds=5.0)
    assert [type(result.error) for result in results] == [KeyboardInterrupt, PeerFailed, PeerFailed]


def _breaks_off_a_loop(world: World) -> None:
    model, optimizer, data = _build()
    server = rw.parameter_server(model, optimizer, mode="async")
    if server._server_loop is not None:
        server._server_loop._shard.update = _interrupt  # type: ignore[method-assign]
    unraisable: list[object] = []
    sys.unraisablehook = unraisable.append
    for (x,) in rw.DataLoader(data, global_batch_size=4):
        _step(model, optimizer, x)
        break
    assert not unraisable
    rw.leave()


def test_an_error_after_break_is_raised_at_the_end() -> None:
    results = testing.run_ranks(_breaks_off_a_loop, 2)
    assert [type(result.error) for result in results] == [PeerFailed, KeyboardInterrupt]


def _after_the_world(_: World) -> int:
    model, optimizer, data = _build()
    server = rw.parameter_server(model, optimizer, mode="async")
    if server.is_server:
        server.serve()
    else:
        _step(model, optimizer, data.tensors[0])
        server.finish()
    rw.leave()
    with pytest.raises(NotJoined, match=r"server.synchronize\(\) was called after"):
        server.synchronize()
    if not server.is_server:
        with pytest.raises(NotJoined, match=r"optimizer.step\(\) was called after"):
            _step(model, optimizer, data.tensors[0])
        with pytest.raises(NotJoined, match=r"server.finish\(\) was called after"):
            server.finish()
    mapped = Path("/proc/self/maps").read_text(encoding="utf-8")
    return 0 if server.is_server else mapped.count("memfd:rankwise")


def test_after_the_world_nothing_is_asked_and_no_memory_is_kept() -> None:
    # The optimizer is there still, and had led to memory as large as the model, twice.
    for result in testing.run_ranks(_after_the_world, 2, exchange="auto"):
        assert result.get() <= 1
