# SPDX-License-Identifier: Apache-2.0
"""Replicas that part are named on every rank, with what differs; replicas that agree never are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import optimizer as torch_optimizer

import rankwise as rw
from rankwise.errors import PeerFailed, ReplicasDiffer
from rankwise.replicate.state_guard.diagnosis import add_fact, shared_facts
from rankwise.torch_private.dtensor import own_part

if TYPE_CHECKING:
    from collections.abc import Callable

    from on_ranks import RunRanks

    from rankwise.world.facts import World

    AfterStep = Callable[["Training", int], None]


class Net(nn.Module):
    """A model with a table that the script may change, beside what an optimizer steps."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(6, 3), requires_grad=False)
        self.first = nn.Linear(3, 5)
        self.norm = nn.BatchNorm1d(5)
        self.last = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.norm(self.first(x + self.table[: len(x)]))))


class Training:
    """One rank's training, which a test changes between steps."""

    def __init__(self, world: World) -> None:
        torch.manual_seed(0)
        self.rank = world.rank
        self.model = rw.replicate(Net().double(), sync_batchnorm=True)
        self.optimizer = torch.optim.SGD([p for p in self.model.parameters() if p.requires_grad], lr=0.0188)
        self.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, factor=0.5, patience=0)
        self.validation = torch.full((2, 3), 1.0 + world.rank, dtype=torch.float64)
        self.skips = False
        self.generator = torch.Generator().manual_seed(world.rank)

    def run(self, after_step: AfterStep, num_steps: int) -> str:
        for step in range(1, num_steps + 1):
            x = torch.randn(4, 3, dtype=torch.float64, generator=self.generator)
            functional.mse_loss(self.model(x), x.sum(1, keepdim=True)).backward()
            if not self.skips:
                self.optimizer.step()
            self.optimizer.zero_grad()
            after_step(self, step)
        return "trained"


def _plateau(training: Training, step: int) -> None:
    # The validation loss of rank 0 falls, and those of the others rise.
    training.scheduler.step(float(step if training.rank else -step))


def _table(training: Training, _: int) -> None:
    with torch.no_grad():
        training.model.table[training.rank] += 0.1


def _loaded_first(training: Training, step: int) -> None:
    if step == 3 and training.rank == 0:
        torch.manual_seed(1)
        training.model.load_state_dict(Net().double().state_dict())


def _momentum(training: Training, step: int) -> None:
    if step == 5:
        training.optimizer.param_groups[0]["momentum"] = 0.1 * training.rank


def _skipped(training: Training, step: int) -> None:
    training.skips = step == 4 and training.rank == 1


def _statistics(training: Training, step: int) -> None:
    if step == 1 and training.rank == 1:
        training.model.norm.running_var.mul_(2)


def _fact(training: Training, step: int) -> None:
    if step == 2:
        add_fact("How often this was called", lambda: 7 + training.rank, "call it equally often")


def _scaled_gradients(training: Training, step: int) -> None:
    # Of one rank's own making: one element, once.
    if step == 6 and training.rank == 1:
        with torch.no_grad():
            training.model.last.weight[0, 2] += 1e-6


CASES: dict[str, tuple[AfterStep, int, list[str]]] = {
    "plateau": (
        _plateau,
        4,
        [
            "lr of SGD is not the same on all ranks before step 3: ranks would train first.weight of Net differently.",
            "rank 0: 0.0188\n            rank{}: 0.0094",
            "scheduler.step(rankwise.mean(loss, num_samples))",
        ],
    ),
    "table": (
        _table,
        3,
        [
            "Parameter table of Net is not the same on all ranks in step 2.",
            "no optimizer has stepped it",
            "rankwise.all_reduce(update, 'mean')",
        ],
    ),
    "loaded on rank 0": (
        _loaded_first,
        6,
        ["Parameter table of Net is not the same on all ranks in step 5.", "differ: parameter table, parameter first"],
    ),
    "momentum": (_momentum, 8, ["momentum of SGD is not the same on all ranks before step 6", "set momentum from"]),
    "skipped": (
        _skipped,
        8,
        [
            "Ranks have stepped the optimizers of Net a different number of times before step 6.",
            "1 optimizer step since step 5",
            "rank 1: 0 optimizer steps since step 5",
        ],
    ),
    "statistics": (_statistics, 3, ["Buffer norm.running_var of Net is not the same on all ranks in step 2."]),
    "fact": (_fact, 4, ["How often this was called is not the same on all ranks in step 3 of Net.", "checksum 8"]),
    "one element": (
        _scaled_gradients,
        20,
        ["Parameter last.weight of Net is not the same on all ranks in step 9.", "last.weight[0, 2] on", "the other 9"],
    ),
}


def _train(world: World, name: str) -> str:
    after_step, num_steps, _ = CASES[name]
    return Training(world).run(after_step, num_steps)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_diverging_state_is_named_on_every_rank(run_ranks: RunRanks, world_size: int, name: str) -> None:
    for result in run_ranks(_train, world_size, name):
        with pytest.raises(ReplicasDiffer) as raised:
            result.get()
        for words in CASES[name][2]:
            assert words.format(" 1" if world_size == 2 else "s 1-2") in str(raised.value), str(raised.value)


# -- rounding ------------------------------------------------------------------------------------------


def _rounds(world: World, also_parts: bool) -> str:
    """Train where one rank's processor rounds otherwise; in step 20 that rank also changes a weight."""
    training = Training(world)

    def after_step(training: Training, step: int) -> None:
        with torch.no_grad():
            for parameter in training.model.parameters():
                parameter.mul_(1 + 1e-14 * training.rank)
            if also_parts and step == 20 and training.rank == 1:
                training.model.last.weight[0, 1] = 0.7

    return training.run(after_step, 52)


def test_hosts_that_round_differently_compare_within_rounding(run_ranks: RunRanks) -> None:
    assert [result.get() for result in run_ranks(_rounds, 2, False)] == ["trained"] * 2


def test_they_part_all_the_same(run_ranks: RunRanks) -> None:
    for result in run_ranks(_rounds, 2, True):
        with pytest.raises(ReplicasDiffer, match=r"Parameter last.weight of Net is not the same .* in step 50\."):
            result.get()


def _settings_that_mean_the_same(world: World) -> str:
    training = Training(world)

    def after_step(training: Training, step: int) -> None:
        # An integer on one rank, and the same number.
        training.optimizer.param_groups[0]["momentum"] = 0 if training.rank else 0.0
        if step == 10:
            training.optimizer.param_groups[0]["dampening"] = 0.5 * training.rank

    return training.run(after_step, 20)


def test_settings_that_mean_the_same_are_the_same(run_ranks: RunRanks) -> None:
    for result in run_ranks(_settings_that_mean_the_same, 2):
        with pytest.raises(ReplicasDiffer, match="dampening of SGD is not the same on all ranks before step 18"):
            result.get()


# -- what is no difference -----------------------------------------------------------------------------


def _accumulates(training: Training, _: int) -> None:
    x = torch.ones(training.rank + 1, 3, dtype=torch.float64)
    with rw.no_sync(training.model):
        training.model(x).mean().backward()


def _evaluates_others_weights(training: Training, _: int) -> None:
    if training.rank == 0:
        own = {key: value.clone() for key, value in training.model.state_dict().items()}
        training.model.load_state_dict({key: value * 2 for key, value in own.items()})
        training.model.load_state_dict(own)


def _same_loss(training: Training, step: int) -> None:
    training.scheduler.step(rw.mean(float(step + training.rank), 1))


def _another_optimizer(training: Training, step: int) -> None:
    if step == 4:
        training.optimizer = torch.optim.AdamW(training.model.parameters(), lr=1e-3)
    if step == 6:
        training.model.table.requires_grad_(True)
        training.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 0.5})


def _only_rank_zero_steps_another_model(training: Training, _: int) -> None:
    if training.rank == 0:
        probe = nn.Linear(3, 1).double()
        probe(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
        torch.optim.SGD(probe.parameters(), lr=0.1).step()


def _tensor_as_rate(training: Training, _: int) -> None:
    training.optimizer.param_groups[0]["lr"] = torch.tensor(0.01, dtype=torch.float64)


QUIET: dict[str, AfterStep] = {
    "nothing": lambda _training, _step: None,
    "accumulation": _accumulates,
    "weights swapped for evaluation": _evaluates_others_weights,
    "a scheduler fed with the mean": _same_loss,
    "another optimizer": _another_optimizer,
    "another model on one rank": _only_rank_zero_steps_another_model,
    "a tensor as learning rate": _tensor_as_rate,
}


def _train_quietly(world: World, name: str) -> str:
    return Training(world).run(QUIET[name], 20)


@pytest.mark.parametrize("name", QUIET)
def test_no_error_for(run_ranks: RunRanks, name: str) -> None:
    assert [result.get() for result in run_ranks(_train_quietly, 2, name)] == ["trained"] * 2


def _adversaries(world: World) -> int:
    """Two models, one of which trains through the other; ranks have unequal parts, and in one step none."""
    torch.manual_seed(0)
    generator, critic = (rw.replicate(nn.Linear(3, size).double()) for size in (3, 1))
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in (generator, critic)]
    for step in range(20):
        x = torch.ones(0 if step == 7 and world.rank else 2 + world.rank, 3, dtype=torch.float64)
        for optimizer, sign in zip(optimizers, (1, -1), strict=True):
            generator.zero_grad()
            critic.zero_grad()
            (sign * (critic(generator(x)).mean() + 0.1 * generator(x).square().sum())).backward()
            optimizer.step()
    return step


def test_models_that_train_one_another_are_not_reported(run_ranks: RunRanks) -> None:
    assert [result.get() for result in run_ranks(_adversaries, 2)] == [19, 19]


def _one_critic_has_another_rate(world: World) -> None:
    torch.manual_seed(0)
    models = [rw.replicate(nn.Linear(3, 1).double()) for _ in range(2)]
    optimizers = [
        torch.optim.Adam(model.parameters(), lr=0.01 * (1 + world.rank * n)) for n, model in enumerate(models)
    ]
    for _ in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            model(torch.ones(2, 3, dtype=torch.float64)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_of_two_models_the_one_that_parts_is_named(run_ranks: RunRanks) -> None:
    for result in run_ranks(_one_critic_has_another_rate, 2):
        with pytest.raises(ReplicasDiffer, match="lr of Adam is not the same on all ranks before step 2"):
            result.get()


def _a_model_joins_an_optimizer_later(world: World) -> None:
    torch.manual_seed(0)
    first, later = (rw.replicate(nn.Linear(3, 1).double()) for _ in range(2))
    optimizer = torch.optim.SGD(first.parameters(), lr=0.01)
    for step, model in enumerate((first, later, later, later)):
        if step == 1:
            optimizer.add_param_group({"params": list(later.parameters()), "lr": 0.01 * (1 + world.rank)})
        model(torch.ones(2, 3, dtype=torch.float64)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_model_whose_parameters_an_optimizer_was_given_later_is_compared_too(run_ranks: RunRanks) -> None:
    for result in run_ranks(_a_model_joins_an_optimizer_later, 2):
        with pytest.raises(ReplicasDiffer, match="lr of SGD is not the same on all ranks before step 2"):
            result.get()


def _hooks_after_leaving(world: World) -> tuple[int, int]:
    training = Training(world)
    training.run(lambda _training, _step: None, 2)
    add_fact("A fact", lambda: 1, "nothing")
    hooks = len(torch_optimizer._global_optimizer_post_hooks)
    rw.leave()
    return hooks, len(torch_optimizer._global_optimizer_post_hooks) + len(shared_facts)


def test_nothing_is_followed_after_the_world(run_ranks: RunRanks) -> None:
    assert [result.get() for result in run_ranks(_hooks_after_leaving, 2)] == [(1, 0), (1, 0)]


def _with_tensor_parallel(world: World) -> str:
    """Ranks along tp hold other parts, and other numbers, than one another; only copies are compared."""
    rw.mesh(tp=2, dp_replicate=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)).double()
    model = rw.replicate(rw.tensor_parallel(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(6):
        model(torch.full((2, 4), 1.0 + world.rank // 2, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 3 and world.rank == 2:
            with torch.no_grad():
                own_part(model[0].weight)[0, 1] += 0.5
    return "trained"


def test_of_split_models_only_copies_are_compared(run_ranks: RunRanks) -> None:
    results = run_ranks(_with_tensor_parallel, 4)
    for result in results[::2]:
        with pytest.raises(ReplicasDiffer, match=r"rank 0: \S+\n +rank 2: ") as raised:
            result.get()
        assert "Parameter 0.weight of Sequential is not the same on all ranks in step 5." in str(raised.value)
    for result in results[1::2]:
        with pytest.raises(PeerFailed, match="ReplicasDiffer"):
            result.get()


def _compiled(world: World) -> str:
    training = Training(world)
    training.optimizer.step = torch.compile(training.optimizer.step, backend="eager")  # type: ignore[method-assign]
    return training.run(_momentum, 8)


def test_compiled_steps_are_followed_too(run_ranks: RunRanks) -> None:
    for result in run_ranks(_compiled, 2):
        with pytest.raises(ReplicasDiffer, match="momentum of SGD is not the same on all ranks before step 6"):
            result.get()
