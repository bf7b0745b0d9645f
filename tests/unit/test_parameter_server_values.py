# SPDX-License-Identifier: Apache-2.0
"""Decisions of parameter servers, as values: placement, which workers may continue, changes, and saves."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from rankwise.errors import CheckpointError, ConfigurationError
from rankwise.parameter_server.messages import TensorBuffer
from rankwise.parameter_server.server_loop import StalenessBound
from rankwise.parameter_server.setup import _updates_to_load
from rankwise.parameter_server.shard import (
    ParameterShard,
    are_sums,
    checked_weights,
    weighted_mean,
)
from rankwise.parameter_server.snapshot import ServerSnapshots, options_of, set_options
from rankwise.replicate.bucket import divide_by_size

if TYPE_CHECKING:
    from pathlib import Path


def test_parameters_are_spread_by_size() -> None:
    assert divide_by_size([10, 1, 4, 5], 2) == [[0], [1, 2, 3]]
    assert divide_by_size([5, 1, 4, 2], 2) == [[0, 1], [2, 3]]
    assert divide_by_size([1, 1, 1], 1) == [[0, 1, 2]]
    assert divide_by_size([1, 1], 4) == [[0], [1], [], []]
    assert divide_by_size([7], 3) == [[0], [], []]
    assert divide_by_size([], 2) == [[], []]


def test_neighbours_travel_in_one_piece() -> None:
    tensors = [torch.zeros(3), torch.zeros(0), torch.zeros(20, dtype=torch.float64), torch.zeros((), dtype=torch.int8)]
    body = TensorBuffer(tensors)
    for number, view in enumerate(body.views):
        view.fill_(number + 1)
    assert body.pieces([]) == []
    (together,) = body.pieces([0, 1, 2])
    assert len(body.pieces([0, 2, 3])) == 2
    other = TensorBuffer(tensors)
    other.pieces([0, 1, 2])[0][:] = together
    assert torch.equal(other.views[0], torch.full((3,), 1.0))
    assert torch.equal(other.views[2], torch.full((20,), 3.0, dtype=torch.float64))


def test_a_worker_is_at_most_so_many_steps_ahead() -> None:
    pace = StalenessBound([0, 1, 2], max_staleness=2)
    for _ in range(2):
        pace.step(0)
        assert pace.may_step(0)
    pace.step(0)
    assert not pace.may_step(0)
    assert pace.slowest() == [1, 2]
    pace.step(1)
    pace.remove(2, has_failed=True)
    assert pace.may_step(0), "who is gone is not waited for"
    assert pace.failed == {2}
    pace.step(0)
    assert not pace.may_step(0)
    pace.end_loop(1, 7, has_stepped=False)
    assert not pace.may_step(0), "a loop without steps is no pause"
    pace.end_loop(1, 5, has_stepped=True)
    assert pace.may_step(0), "nor who has come to the end"
    assert pace.num_loops(5) == pace.num_loops(0) == 0
    assert pace.only_wait_for({0, 1}) == {0}
    assert pace.only_wait_for({1}) == set(), "who is silent is done, and who is not is heard"
    pace.end_loop(0, 5, has_stepped=True)
    assert pace.only_wait_for({0, 1}) == set()
    assert pace.num_loops(5) == pace.num_loops(0) == 1
    assert pace.num_loops(7) == 0, "loops over another loader are not those"
    pace.remove(0, has_failed=False)
    pace.remove(1, has_failed=False)
    assert pace.living == set()


def test_a_step_without_samples_counts_for_nothing() -> None:
    nothing = torch.full((2,), math.nan)
    mean = weighted_mean([(0.0, nothing), (3.0, torch.ones(2)), (1.0, None)], 4.0)
    assert mean is not None
    assert torch.equal(mean, torch.full((2,), 0.75))
    assert weighted_mean([(1.0, None)], 1.0) is None
    zero = weighted_mean([(0.0, nothing), (0.0, None)], 0.0)
    assert zero is not None
    assert torch.equal(zero, torch.zeros(2)), "what was used is updated all the same"


def test_several_backwards_need_equal_shares() -> None:
    assert checked_weights([0, 1], [[2.0, 4.0], [1.0, 2.0]]) == [4.0, 2.0]
    assert checked_weights([0, 1], [[], [2.0]]) == [0.0, 2.0]
    with pytest.raises(ConfigurationError, match=r"rank 1: backwards that count 4 and 0"):
        checked_weights([0, 1], [[4.0, 4.0], [4.0, 0.0]])


def test_a_step_is_of_sums_or_of_means() -> None:
    assert are_sums([0, 1], [[4.0], [3.0]], [[True], [True]])
    assert not are_sums([0, 1], [[4.0], [3.0]], [[False], [False]])
    assert are_sums([0, 1], [[4.0], [0.0]], [[True], [False]]), "one without samples says nothing"
    with pytest.raises(ConfigurationError, match=r"rank 1: a mean"):
        are_sums([0, 1], [[4.0], [3.0]], [[True], [False]])


def test_a_saved_value_is_equal_on_all_ranks_or_an_error() -> None:
    assert _updates_to_load({2: [4, 8], 3: [4]}, is_sync=True) == [4, 4]
    assert _updates_to_load({2: [4, 8], 3: [5]}, is_sync=False) == [8, 5]
    assert _updates_to_load({2: [4], 3: []}, is_sync=True) is None, "it ended while they saved for the first time"
    with pytest.raises(CheckpointError, match=r"rank 2: 4, 8\n.*rank 3: none"):
        _updates_to_load({2: [4, 8], 3: []}, is_sync=True)


def _rows(numbers: list[int], value: float) -> torch.Tensor:
    return torch.sparse_coo_tensor(
        torch.tensor([numbers]), torch.full((len(numbers), 2), value), (6, 2), check_invariants=True
    )


@pytest.mark.parametrize(("momentum", "num_whole"), [(0.0, 0), (0.9, 1)])
def test_only_rows_that_changed_come_back(momentum: float, num_whole: int) -> None:
    table, other = nn.Parameter(torch.zeros(6, 2)), nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([table, other], lr=1.0, momentum=momentum)
    kept = ParameterShard([table, other], optimizer, optimizer.step)
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


def _trained(
    folder: Path, num_steps: int, save_at: tuple[int, ...] = (), *, size: int = 5, kind: type = torch.optim.Adam
) -> tuple[nn.Parameter, ServerSnapshots]:
    parameter = nn.Parameter(torch.zeros(size))
    optimizer = kind([parameter], lr=0.1)
    saved = ServerSnapshots(
        folder, server=0, num_servers=1, every=1, names=["p"], parameters=[parameter], optimizer=optimizer
    )
    start = 0
    if updates := saved.updates():
        assert saved.load(updates[-1]) == {"0": {"position": updates[-1]}}
        start = updates[-1]
    for step in range(start, num_steps):
        if step in save_at:
            saved.save(step, {0: {"position": step}})
        parameter.grad = torch.full((size,), float(step % 3))
        optimizer.step()
    return parameter, saved


def test_a_saved_state_that_cannot_be_read_is_an_error_and_is_kept(tmp_path: Path) -> None:
    _trained(tmp_path, 7, save_at=(2, 4))
    newest = max(tmp_path.iterdir())
    data = newest.read_bytes()
    newest.unlink()
    newest.symlink_to(newest)
    with pytest.raises(CheckpointError, match=f"{newest.name} cannot be read"):
        _trained(tmp_path, 9)
    newest.unlink()
    newest.write_bytes(data)
    for path in tmp_path.iterdir():
        path.write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match=r"All saved states of parameter server 0 in .* are damaged") as caught:
        _trained(tmp_path, 9)
    assert newest.name in str(caught.value)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_saved_state_resumes_bitwise(tmp_path: Path) -> None:
    whole, _ = _trained(tmp_path / "none", 9)
    tmp_path /= "some"
    _trained(tmp_path, 7, save_at=(2, 4, 6))
    assert len(list(tmp_path.iterdir())) == 2, "the newest two are kept"
    with pytest.raises(CheckpointError, match=r"only in the file: p \[5\]"):
        _trained(tmp_path, 9, size=1)
    with pytest.raises(CheckpointError, match="another optimizer: Adam"):
        _trained(tmp_path, 9, kind=torch.optim.SGD)
    (tmp_path / ".server-0-of-1-update-000000000008.safetensors.new").touch()  # of a write that was cut off
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
    _trained(tmp_path, 6, save_at=(5,))
    assert len(list(tmp_path.iterdir())) == 2, "one that was passed over does not stand in the way"
    assert saved.updates() == [4, 5]
    newest = max(tmp_path.iterdir())
    newest.rename(newest.with_name("server-1-of-2-update-000000000004.safetensors"))
    with pytest.raises(CheckpointError, match="2 parameter servers"):
        saved.updates()
