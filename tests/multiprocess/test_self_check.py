# SPDX-License-Identifier: Apache-2.0
"""On a torch that is not a tested one, strategies train a small model first, and say when its gradients are wrong.

Which torch counts as tested is patched; everything else is real: the job's ranks, their groups, the gradients.
"""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from rankwise import testing
from rankwise.comm.session import current
from rankwise.errors import WrongGradients
from rankwise.log import warn
from rankwise.pipeline.pipeline import pipeline
from rankwise.pipeline.step_api import Pipeline
from rankwise.place.place import place
from rankwise.replicate import self_check
from rankwise.replicate.device_mesh import mesh
from rankwise.shard.shard import shard
from rankwise.shard.sharded_gradients import ShardSync
from rankwise.tensor_parallel.tensor_parallel import tensor_parallel
from rankwise.world import torch_versions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rankwise.replicate.self_check import Bench, Compared
    from rankwise.world.facts import World


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4), nn.Linear(4, 4)).double()


def pipelined(schedule: str) -> None:
    pipeline(net(), nn.functional.mse_loss, example=torch.ones(4, 4).double(), schedule=schedule)


WAYS: dict[str, Callable[[], object]] = {
    "shard": lambda: shard(net()),
    "tensor_parallel": lambda: tensor_parallel(net()),
    "tensor_parallel and shard": lambda: shard(tensor_parallel(net())),
    "pipeline": lambda: pipelined("1f1b"),
    "pipeline, split backward": lambda: pipelined("zbv_zero_bubble"),
    "place": lambda: place(net(), {"": "cpu"}),
}


def states() -> tuple[Any, ...]:
    session = current()
    recorder = session.detector.recorder if session.detector is not None else None
    return (
        torch.get_rng_state().tolist(),
        random.getstate(),
        np.random.get_state()[1].tolist(),  # noqa: NPY002 - the one that a script may draw from
        torch.is_grad_enabled(),
        None if recorder is None else recorder.step,
    )


def use(way: str, sizes: dict[str, int], *, is_tested: bool) -> tuple[list[str], bool, int]:
    """Use a strategy; return what was tried out, whether all states stayed, and how many groups torch has then."""
    torch_versions.TESTED = (torch_versions.release_of(torch.__version__),) if is_tested else ((2, 1),)
    if sizes:
        mesh(**sizes)
    tried: list[str] = []
    compare = self_check._compare

    def compared(strategy: str, pairs: Iterable[Compared], bench: Bench) -> None:
        found = list(pairs)
        assert found, "nothing was compared"
        compare(strategy, found, bench)
        tried.append(strategy)

    self_check._compare = compared
    torch.manual_seed(17)  # as the model of the strategy itself is built
    net()
    before = states()
    WAYS[way]()
    same = states() == before
    return tried, same, len(dist.distributed_c10d._world.pg_map)


def used(world: World, way: str, sizes: dict[str, int], *, is_tested: bool) -> tuple[list[str], bool, int]:
    return use(way, sizes, is_tested=is_tested)


@pytest.mark.parametrize(
    ("way", "world_size", "sizes"),
    [
        ("shard", 1, {}),
        ("shard", 3, {}),
        ("shard", 4, {"dp_replicate": 2, "dp_shard": 2}),
        ("tensor_parallel", 2, {}),
        ("tensor_parallel and shard", 4, {"dp_shard": 2, "tp": 2}),
        ("pipeline", 2, {}),
        ("pipeline", 4, {"dp_replicate": 2, "pp": 2}),
        ("pipeline, split backward", 2, {}),
        ("place", 1, {}),
    ],
)
def test_a_strategy_is_tried_out_once_and_leaves_nothing(way: str, world_size: int, sizes: dict[str, int]) -> None:
    names = [name.partition(",")[0] for name in way.split(" and ")]
    for result in testing.run_ranks(partial(used, way=way, sizes=sizes, is_tested=False), world_size):
        tried, same, num_groups = result.get()
        assert tried == names
        assert same
    for result in testing.run_ranks(partial(used, way=way, sizes=sizes, is_tested=True), world_size):
        assert result.get() == ([], True, num_groups)


def test_a_trial_that_uses_another_strategy_says_nothing_after_the_trial_of_that(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As shard()'s does where the ranks have an axis for tensor parallelism and torch itself has split the model."""
    monkeypatch.setattr(torch_versions, "TESTED", ((2, 1),))
    monkeypatch.setattr(self_check, "_checked", set())

    def inner(_: Bench) -> Iterable[Compared]:
        warn("of the inner trial")
        return []

    def outer(_: Bench) -> Iterable[Compared]:
        self_check.check_torch("tensor_parallel", inner)
        warn("of the outer trial")
        return []

    self_check.check_torch("shard", outer)
    warn("of the model")
    assert caplog.messages == ["of the model"]


def weigh_in_place(self: ShardSync, group: Any) -> None:
    """Weigh gradients as rankwise did before torch 2.15: by an attribute that is another gradient's view there."""
    for one in group.fsdp_params:
        parameter = getattr(one, "_unsharded_param", None)
        gradient = None if parameter is None else parameter.grad
        if gradient is not None:
            if not self._in_backward:
                self._begin(self.loss.forward_weight)
            self._weigh()
            self._used.add(self._number_of[id(one)])
            gradient.mul_(self._factor)
            if self._accumulation.is_continued:
                earlier = one.unsharded_accumulated_grad
                if earlier is None:
                    one.unsharded_accumulated_grad = gradient
                else:
                    earlier += gradient
                parameter.grad = None
        if not self._accumulation.is_continued and one.unsharded_accumulated_grad is not None:
            one.unsharded_accumulated_grad.mul_(self._carried_factor)


def shard_weighing_in_place(world: World) -> None:
    torch_versions.TESTED = ((2, 1),)
    ShardSync._before_reduction = weigh_in_place
    shard(net())


def test_the_change_of_torch_2_15_is_found() -> None:
    """Without the fix of that version: wrong there, right before."""
    for result in testing.run_ranks(shard_weighing_in_place, 2):
        if torch_versions.release_of(torch.__version__) < (2, 15):
            result.get()
        else:
            assert_found(result.error, "shard")


def assert_found(error: BaseException | None, strategy: str) -> None:
    assert isinstance(error, WrongGradients), error
    assert f"rankwise.{strategy}() computes wrong gradients on torch {torch.__version__}" in str(error)
    assert f"pip install 'torch>={'.'.join(map(str, torch_versions.OLDEST))}," in str(error)
    assert "compared with autograd" in str(error)


def break_strategy(world: World, way: str) -> None:
    """Break one rank's arithmetic, each strategy's at a place of its own, and use it."""
    torch_versions.TESTED = ((2, 1),)
    if way == "shard":
        ShardSync._weigh = lambda self: None
    elif way == "tensor_parallel":
        compute = nn.Linear.forward
        nn.Linear.forward = lambda self, x: compute(self, x) * (1 + world.rank)
    elif way == "pipeline":
        step = Pipeline.__call__
        Pipeline.__call__ = lambda self, x, target: step(self, x * 1.5, target)
    WAYS[way]()


@pytest.mark.parametrize(("way", "world_size"), [("shard", 2), ("tensor_parallel", 2), ("pipeline", 2)])
def test_a_difference_is_an_error_on_every_rank(way: str, world_size: int) -> None:
    for result in testing.run_ranks(partial(break_strategy, way=way), world_size):
        assert_found(result.error, way)


def raise_in_place(world: World) -> None:
    torch_versions.TESTED = ((2, 1),)
    sin = torch.sin
    nn.Module.__call__ = lambda self, x: sin(x, None, None)
    WAYS["place"]()


def test_a_trial_that_raises_is_an_error_that_says_so() -> None:
    (result,) = testing.run_ranks(raise_in_place, 1)
    assert_found(result.error, "place")
    assert "TypeError" in str(result.error)
