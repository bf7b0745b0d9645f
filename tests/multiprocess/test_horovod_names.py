# SPDX-License-Identifier: Apache-2.0
"""Undocumented names that public scripts and test suites of Horovod use, on real ranks."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import rankwise.compat.horovod as hvd
from rankwise import testing
from rankwise.compat.horovod import elastic, extensions

if TYPE_CHECKING:
    from rankwise.world.facts import World


def _optimizer(model: nn.Module, **options: Any) -> Any:
    groups = [{"params": layer.parameters()} for layer in model.children()]
    return hvd.DistributedOptimizer(torch.optim.SGD(groups, lr=0.1), **options)


def _parameter_names(_: World) -> list[list[str]]:
    hvd.init()
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    unnamed = _optimizer(model)._parameter_names
    named = _optimizer(model, named_parameters=model.named_parameters())._parameter_names
    assert named[model[1].bias] == "1.bias"
    return hvd.allgather_object(sorted(unnamed.values())) + hvd.allgather_object(sorted(named.values()))


def test_an_optimizer_knows_its_parameters_by_name_alike_on_all_ranks() -> None:
    for result in testing.run_ranks(_parameter_names, 2):
        unnamed, other, named, other_named = result.get()
        assert unnamed == other == [f"allreduce.noname.{group}.{number}" for group in range(2) for number in range(2)]
        assert named == other_named == ["0.bias", "0.weight", "1.bias", "1.weight"]


FILTERS = (
    r"optimizer\.step\(\) called without optimizer\.skip_synchronize\(\) context after optimizer\.synchronize\(\)\.",
    r"Parameter `num_groups` has been replaced by `groups`",
    r"Parameter `average` has been replaced with `op`",
)


def _warned(world: World) -> tuple[int, int]:
    hvd.init()
    counts = []
    for filters in ((), FILTERS):
        model = nn.Linear(2, 1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for message in filters:
                warnings.filterwarnings("ignore", message=message)
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), num_groups=1)
            model(torch.ones(1, 2) * world.rank).sum().backward()
            optimizer.synchronize()
            optimizer.step()
            hvd.allreduce(torch.ones(1), average=False)
        counts.append(len(caught))
    return counts[0], counts[1]


def test_filters_for_horovods_warnings_hold() -> None:
    for result in testing.run_ranks(_warned, 2):
        assert result.get() == (3, 0)


def _asked_before_init(_: World) -> list[float]:
    hvd.check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", __file__, "mpi_lib_v2")
    if extensions.gloo_built(verbose=True) and not extensions.mpi_built():
        with extensions.env(HOROVOD_STALL_CHECK_TIME_SECONDS="300"):
            hvd.init()
    # The parts of a list, one per rank, as test suites and pipelines of gradients use it.
    parts = extensions.split_list([1, 2, 3], hvd.size())
    assert parts == [[1, 2], [3]]
    own = parts[hvd.rank()]
    mpi_ops: Any = hvd.mpi_ops
    assert mpi_ops.size() == hvd.size()
    return hvd.allreduce(torch.tensor([float(sum(own))]), op=mpi_ops.Sum).tolist()


def test_a_script_queries_what_was_built_and_trains() -> None:
    assert [result.get() for result in testing.run_ranks(_asked_before_init, 2)] == [[6.0], [6.0]]


def _resets(world: World) -> tuple[list[str], int, float]:
    hvd.init()
    state: Any = elastic.ObjectState(hvd.broadcast_object, hvd.rank, step=0)
    calls: list[str] = []
    state.register_reset_callbacks([lambda: calls.append("callback")])

    def train(state: Any, *, reset: float) -> float:
        state.step += 1
        if calls:
            return float(hvd.allreduce(torch.tensor([reset + world.rank]), op=hvd.Sum).item())
        raise hvd.HorovodInternalError

    trained = elastic.run_fn(train, lambda: calls.append("reset"))
    total = trained(state, reset=1.0)
    return calls, state.step, total


def test_run_fn_resets_what_it_was_given_and_goes_back_to_the_commit() -> None:
    for result in testing.run_ranks(_resets, 2):
        assert result.get() == (["reset", "callback"], 1, 3.0)
