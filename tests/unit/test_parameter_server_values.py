# SPDX-License-Identifier: Apache-2.0
"""What parameter servers decide, as values: who keeps what, who may go on, what has changed, what is saved."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from rankwise.errors import CheckpointError, ConfigurationError
from rankwise.parallel.server.kept import Kept, weighted_mean
from rankwise.parallel.server.layout import Body, spread
from rankwise.parallel.server.options import options_of, set_options
from rankwise.parallel.server.pace import Pace
from rankwise.parallel.server.saved import Saved

if TYPE_CHECKING:
    from pathlib import Path


def test_parameters_are_spread_by_size() -> None:
    assert spread([10, 1, 4, 5], 2) == [[0], [1, 2, 3]]
    assert spread([1, 1, 1], 1) == [[0, 1, 2]]
    assert spread([7], 3) == [[0], [], []]


def test_neighbours_travel_in_one_piece() -> None:
    tensors = [torch.zeros(3), torch.zeros(0), torch.zeros(20, dtype=torch.float64), torch.zeros((), dtype=torch.int8)]
    body = Body(tensors)
    for number, view in enumerate(body.views):
        view.fill_(number + 1)
    assert body.pieces([]) == []
    (together,) = body.pieces([0, 1, 2])
    assert len(body.pieces([0, 2, 3])) == 2
    other = Body(tensors)
    other.pieces([0, 1, 2])[0][:] = together
    assert torch.equal(other.views[0], torch.full((3,), 1.0))
    assert torch.equal(other.views[2], torch.full((20,), 3.0, dtype=torch.float64))


def test_a_worker_is_at_most_so_many_steps_ahead() -> None:
    pace = Pace([0, 1, 2], max_staleness=2)
    for _ in range(2):
        pace.step(0)
        assert pace.may_go_on(0)
    pace.step(0)
    assert not pace.may_go_on(0)
    assert pace.slowest() == [1, 2]
    pace.step(1)
    pace.go(2, has_failed=True)
    assert pace.may_go_on(0), "who is gone is not waited for"
    assert pace.failed == {2}
    pace.step(0)
    assert not pace.may_go_on(0)
    pace.end_loop(1)
    assert pace.may_go_on(0), "nor who has come to the end"
    assert not pace.have_ended_loop(1)
    pace.end_loop(0)
    assert pace.have_ended_loop(1)
    assert not pace.have_ended_loop(2)
    pace.go(0, has_failed=False)
    pace.go(1, has_failed=False)
    assert pace.living == set()


def test_a_step_without_samples_counts_for_nothing() -> None:
    nothing = torch.full((2,), math.nan)
    mean = weighted_mean([(0.0, nothing), (3.0, torch.ones(2)), (1.0, None)], 4.0)
    assert mean is not None
    assert torch.equal(mean, torch.full((2,), 0.75))
    assert weighted_mean([(1.0, None)], 1.0) is None


def _rows(numbers: list[int], value: float) -> torch.Tensor:
    return torch.sparse_coo_tensor(
        torch.tensor([numbers]), torch.full((len(numbers), 2), value), (6, 2), check_invariants=True
    )


@pytest.mark.parametrize(("momentum", "num_whole"), [(0.0, 0), (0.9, 1)])
def test_only_rows_that_changed_come_back(momentum: float, num_whole: int) -> None:
    table, other = nn.Parameter(torch.zeros(6, 2)), nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([table, other], lr=1.0, momentum=momentum)
    kept = Kept([table, other], optimizer, optimizer.step)
    first = weighted_mean([(1.0, _rows([1, 4], 1.0)), (1.0, _rows([4], 3.0))], 2.0)
    kept.update([first, None])
    kept.update([_rows([0], 1.0), None])
    _, whole, rows = kept.since(0)
    assert len(whole) == num_whole
    if not momentum:
        assert [one.indices.tolist() for one in rows] == [[0, 1, 4]]
        assert torch.equal(rows[0].values, torch.tensor([[-1.0, -1.0], [-0.5, -0.5], [-2.0, -2.0]]))
        _, whole, rows = kept.since(1)
        assert [one.indices.tolist() for one in rows] == [[0]]
        kept.update([torch.ones(6, 2), torch.ones(3)])
        body, whole, rows = kept.since(2)
        assert (whole, rows) == ([0, 1], [])
        assert torch.equal(body.views[1], torch.full((3,), -1.0))
        assert kept.since(3)[1:] == ([], [])


def test_options_arrive_as_they_were() -> None:
    there = torch.optim.AdamW([nn.Parameter(torch.zeros(2))], lr=0.1, betas=(0.5, 0.7))
    here = torch.optim.AdamW([nn.Parameter(torch.zeros(2))], lr=torch.tensor(0.3))
    set_options(here, options_of(there))
    assert float(here.param_groups[0]["lr"]) == pytest.approx(0.1)
    assert here.param_groups[0]["betas"] == (0.5, 0.7)
    there.param_groups[0]["strange"] = object()
    with pytest.raises(ConfigurationError, match="strange"):
        options_of(there)


def _trained(folder: Path, num_steps: int, save_at: tuple[int, ...] = ()) -> tuple[nn.Parameter, Saved]:
    parameter = nn.Parameter(torch.zeros(5))
    optimizer = torch.optim.Adam([parameter], lr=0.1)
    saved = Saved(folder, server=0, num_servers=1, every=1, names=["p"], parameters=[parameter], optimizer=optimizer)
    start = 0
    if updates := saved.updates():
        assert saved.load(updates[-1]) == {"0": {"position": updates[-1]}}
        start = updates[-1]
    for step in range(start, num_steps):
        if step in save_at:
            saved.save(step, {0: {"position": step}})
        parameter.grad = torch.full((5,), float(step % 3))
        optimizer.step()
    return parameter, saved


def test_what_was_saved_goes_on_to_the_bit(tmp_path: Path) -> None:
    whole, _ = _trained(tmp_path / "none", 9)
    _trained(tmp_path, 7, save_at=(2, 4, 6))
    assert len(list(tmp_path.iterdir())) == 2, "the newest two are kept"
    newest = max(tmp_path.iterdir())
    assert _trained(tmp_path, 6)[1].updates() == [4, 6]
    again, _ = _trained(tmp_path, 9)
    assert torch.equal(again, whole)
    data = bytearray(newest.read_bytes())
    data[-3] ^= 1
    newest.write_bytes(data)
    again, saved = _trained(tmp_path, 9)
    assert saved.updates() == [4], "a damaged file is passed over"
    assert torch.equal(again, whole)
    newest.rename(newest.with_name("server-1-of-2-update-000000000004.safetensors"))
    with pytest.raises(CheckpointError, match="2 parameter servers"):
        saved.updates()
