# SPDX-License-Identifier: Apache-2.0
"""One copy per host: ranks that share a model's parameters train as one rank does, whatever the script does to them."""

from __future__ import annotations

import copy
import io
import logging
import os
import pickle
import resource
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch
from on_ranks import one_rank
from replicas import TOLERANCE, Net, batches, built, largest_difference, part
from said import check_said, listening
from torch import nn
from torch.utils.data import DataLoader, Dataset

import rankwise as rw
from rankwise.errors import CollectiveMismatch, ConfigurationError, PeerFailed, ReplicasDiffer
from rankwise.health.fork_safety import threads_are_known
from rankwise.replicate.one_copy.divided_step import INDEPENDENT
from rankwise.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from rankwise.world.facts import World

SIZES = (12, 7, 2, 12, 5, 9, 4, 11)
Result = dict[str, torch.Tensor]


def _loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor], world: World) -> torch.Tensor:
    x, y = (part(one, world.rank, world.world_size) for one in batch)
    return nn.functional.mse_loss(model(x), y)


def _replicated(make: Callable[[], nn.Module] = Net) -> nn.Module:
    return rw.replicate(built(make), one_copy_per_host=True)


def _values(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Result:
    """Return copies of all values, of the optimizer's state too."""
    found = {name: value.clone() for name, value in model.state_dict().items()}
    if optimizer is not None:
        for number, state in optimizer.state_dict()["state"].items():
            found |= {f"{number}.{key}": v.clone().double() for key, v in state.items() if isinstance(v, torch.Tensor)}
    return found


def _check_as_one_rank(train: Callable[..., Result], *args: object, sizes: tuple[int, ...] = (2, 3)) -> None:
    reference = one_rank(train, *args)
    for world_size in sizes:
        for result in run_ranks(train, world_size, *args):
            assert largest_difference(result.get(), reference) < TOLERANCE


# -- optimizers ----------------------------------------------------------------------------------------


def _train(world: World, kind: str) -> Result:
    model = _replicated()
    parameters = list(model.parameters())
    settings: dict[str, Any] = {"SGD": {"momentum": 0.9, "nesterov": True}, "Adam": {"amsgrad": True}}.get(kind, {})
    groups = [{"params": parameters[:3]}, {"params": parameters[3:], "lr": 0.02}]
    optimizer = getattr(torch.optim, kind)(groups, lr=0.05, **settings)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    for step, batch in enumerate(batches(SIZES)):
        micro = [tuple(part(one, index, 2) for one in batch) for index in range(2)] if step % 3 == 1 else [batch]
        for one in micro[:-1]:
            with rw.no_sync(model):
                _loss(model, one, world).backward()
        _loss(model, micro[-1], world).backward()
        if step % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=step < 4)
        assert model.never.weight.grad is None
    return _values(model, optimizer)


@pytest.mark.parametrize("kind", INDEPENDENT)
def test_every_optimizer_that_treats_parameters_independently_is_exact(kind: str) -> None:
    _check_as_one_rank(_train, kind, sizes=(2, 3, 4) if kind == "AdamW" else (3,))


class Sign(torch.optim.Optimizer):
    """An optimizer of the user's own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            scale = sum(one.grad.square().sum() for one in group["params"] if one.grad is not None).sqrt()
            for one in group["params"]:
                if one.grad is not None:
                    self.state[one]["sum"] = self.state[one].get("sum", 0) + one.grad / scale
                    one.sub_(group["lr"] * self.state[one]["sum"])


def _with_another(world: World, wants: bool | None) -> Result:
    """Train with AdamW first, then with an optimizer that looks at all parameters at once."""
    model = rw.replicate(built(Wide), one_copy_per_host=wants)
    usual, own = torch.optim.AdamW(model.parameters(), lr=0.01), Sign(model.parameters())
    for step, batch in enumerate(batches(SIZES)):
        _loss(model, batch, world).backward()
        (own if step == 3 else usual).step()
        model.zero_grad()
    return _values(model, usual)


class Wide(Net):
    """Large enough that ranks share it by default."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Sequential(nn.Linear(3, 12000), nn.Tanh(), nn.Linear(12000, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wide(super().forward(x))


def test_an_unknown_optimizer_gives_every_rank_its_own_copy() -> None:
    _check_as_one_rank(_with_another, None)


def _logged(world: World) -> list[str]:
    logging.getLogger("rankwise").setLevel(logging.INFO)
    with listening() as said:
        _with_another(world, None)
    return [text for text in said if "cop" in text]


def test_the_log_tells_who_has_copies() -> None:
    first, second = (result.get() for result in run_ranks(_logged, 2))
    words = "every rank has its own copy of the parameters from now on: Sign may update a parameter by others"
    size = "Wide: one copy of the parameters per host, 0.6 MiB for up to 2 ranks"
    check_said(first, [f"{size}, and as much to undo a step", words])
    assert not second


def test_an_unknown_optimizer_is_an_error_where_one_copy_is_wanted() -> None:
    for result in run_ranks(_with_another, 2, True):
        with pytest.raises(ConfigurationError, match="Wide cannot have one copy per host any more: Sign may update"):
            result.get()


def _with_closure(world: World, kind: str) -> Result:
    model = rw.replicate(built(Wide))
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.05)
    for batch in batches(SIZES[:3]):

        def closure(batch: Any = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = _loss(model, batch, world)
            loss.backward()
            if kind != "LBFGS":  # which blows rounding up
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            return rw.mean(loss.detach(), len(part(batch[0], world.rank, world.world_size)))

        optimizer.step(closure)
    return _values(model)


@pytest.mark.parametrize("kind", ["AdamW", "LBFGS"])
def test_closures_are_exact(kind: str) -> None:
    _check_as_one_rank(_with_closure, kind)


def _two_models(world: World) -> Result:
    first, second = _replicated(), _replicated(lambda: Net(batchnorm=False))
    optimizers = [torch.optim.Adam(first.parameters()), torch.optim.SGD(second.parameters(), lr=0.1, momentum=0.9)]
    both = torch.optim.RMSprop([*first.parameters(), *second.parameters()], lr=0.001)
    for step, batch in enumerate(batches(SIZES)):
        for model, optimizer in zip((first, second), optimizers, strict=True):
            first.zero_grad()
            second.zero_grad()
            loss = _loss(model, batch, world)
            loss.backward()
            optimizer.step()
        if step % 3 == 2:
            _loss(nn.Sequential(first, nn.Linear(3, 6).double().requires_grad_(False), second), batch, world).backward()
            both.step()
    return {**_values(first, optimizers[0]), **{f"second.{k}": v for k, v in _values(second, optimizers[1]).items()}}


def test_several_models_and_optimizers_are_exact() -> None:
    torch.manual_seed(0)
    _check_as_one_rank(_two_models, sizes=(3,))


def _frozen_at_first(world: World) -> Result:
    model = built(Net)
    model.second.requires_grad_(False)
    rw.replicate(model, one_copy_per_host=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step, batch in enumerate(batches(SIZES)):
        if step == 3:
            model.second.requires_grad_(True)
        if step == 5:
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, dtype=torch.float64))]})
        _loss(model, batch, world).backward()
        optimizer.step()
        optimizer.zero_grad()
    return _values(model, optimizer)


def test_layers_unfrozen_later_are_exact() -> None:
    _check_as_one_rank(_frozen_at_first, sizes=(3,))


def _with_masters(world: World, wants: bool) -> Result:
    model = rw.replicate(built(Net).bfloat16(), one_copy_per_host=wants)
    masters = [one.detach().float().clone() for one in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=0.05)
    for _ in range(5):
        x = torch.full((2 + world.rank, 6), 0.5 + world.rank, dtype=torch.bfloat16)
        model(x).square().mean().backward()
        for master, one in zip(masters, model.parameters(), strict=True):
            master.grad = None if one.grad is None else one.grad.float()
        optimizer.step()
        with torch.no_grad():
            for master, one in zip(masters, model.parameters(), strict=True):
                one.copy_(master)
        model.zero_grad()
    return _values(model)


def test_masters_in_float32_are_copied_into_a_model_in_bfloat16() -> None:
    expected = [result.get() for result in run_ranks(_with_masters, 3, False)]
    for result, other in zip(run_ranks(_with_masters, 3, True), expected, strict=True):
        found = result.get()
        assert all(found[name].equal(other[name]) for name in other)


def _scaled(world: World) -> Result:
    model = _replicated()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step, batch in enumerate(batches(SIZES)):
        loss = _loss(model, batch, world)
        if step == 3:
            # Not finite, so that the scaler skips the step on every rank.
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return {**_values(model, optimizer), "scale": torch.tensor(scaler.get_scale())}


def test_a_scaler_that_skips_steps_is_exact() -> None:
    _check_as_one_rank(_scaled, sizes=(3,))


def _saved(world: World, folder: str, num_steps: int, wants: bool) -> Result:
    model = rw.replicate(built(Net), one_copy_per_host=wants)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    checkpoints = rw.Checkpointer(folder)
    progress = {"step": torch.zeros((), dtype=torch.int64)}
    checkpoints.restore(model=model, optimizer=optimizer, progress=progress)
    first = int(progress["step"])
    for batch in batches(SIZES)[first : first + num_steps]:
        _loss(model, batch, world).backward()
        optimizer.step()
        optimizer.zero_grad()
        progress["step"] += 1
    checkpoints.save(model=model, optimizer=optimizer, progress=progress)
    return _values(model, optimizer)


def test_checkpoints_resume_under_any_arrangement(tmp_path: Path) -> None:
    reference = one_rank(_saved, str(tmp_path / "whole"), len(SIZES), True)
    for world_size, wants, num_steps in ((3, True, 2), (2, True, 2), (4, False, 1), (1, True, 1), (2, True, 2)):
        results = [one.get() for one in run_ranks(_saved, world_size, str(tmp_path / "parts"), num_steps, wants)]
    for result in results:
        assert largest_difference(result, reference) < TOLERANCE
    sizes = [
        sum(one.stat().st_size for one in folder.rglob("*") if one.is_file())
        for folder in (max((tmp_path / name).iterdir()) for name in ("whole", "parts"))
    ]
    assert sizes[1] < 1.2 * sizes[0], "each state is written once"


# -- what the script does to parameters ----------------------------------------------------------------


@dataclass
class Changed:
    """A training whose script changes more than gradients."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    averages: Result = field(default_factory=dict)


def _average(one: Changed, step: int) -> None:
    for name, parameter in one.model.named_parameters():
        average = one.averages.setdefault(name, parameter.clone())
        average.lerp_(parameter, 0.3)
        if step % 2:
            parameter.copy_(average)


def _clamp(one: Changed, _: int) -> None:
    for parameter in one.model.parameters():
        parameter.data.clamp_(-0.2, 0.2)


def _scale_one_element(one: Changed, step: int) -> None:
    if step == 2:
        one.model.last.weight[0, 1] *= 3


def _load(one: Changed, step: int) -> None:
    if step == 3:
        torch.manual_seed(1)
        one.model.load_state_dict(Wide().double().state_dict())


def _swap_and_back(one: Changed, _: int) -> None:
    backup = {name: parameter.data for name, parameter in one.model.named_parameters()}
    for parameter in one.model.parameters():
        parameter.data = parameter.data * 2
    one.model(torch.ones(2, 6, dtype=torch.float64))
    for name, parameter in one.model.named_parameters():
        parameter.data = backup[name]


def _other_memory(one: Changed, step: int) -> None:
    if step == 2:
        for parameter in one.model.parameters():
            parameter.data = parameter.data * 0.5


def _reset_state(one: Changed, step: int) -> None:
    if step == 4:
        for state in one.optimizer.state.values():
            state["exp_avg"].zero_()


def _load_state(one: Changed, step: int) -> None:
    if step == 4:
        held = copy.deepcopy(one.optimizer.state_dict())
        for state in held["state"].values():
            state["exp_avg"] *= 0.5
        one.optimizer.load_state_dict(held)


CHANGES = [_average, _clamp, _scale_one_element, _load, _swap_and_back, _other_memory, _reset_state, _load_state]


def _changing(world: World, change: Callable[[Changed, int], None]) -> Result:
    model = rw.replicate(built(Wide))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    changed = Changed(model, optimizer)
    for step, batch in enumerate(batches(SIZES)):
        _loss(model, batch, world).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            change(changed, step)
    return _values(model, optimizer)


@pytest.mark.parametrize("change", CHANGES)
def test_changes_outside_the_optimizer_count_once(change: Callable[[Changed, int], None]) -> None:
    _check_as_one_rank(_changing, change, sizes=(3,))


def _changed_alone(world: World, what: str) -> None:
    model = _replicated()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step, batch in enumerate(batches(SIZES)):
        _loss(model, batch, world).backward()
        if world.rank == 1 and step == (0 if what == "gradient" else 2):
            _change_alone(model, optimizer, what)
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def _change_alone(model: nn.Module, optimizer: torch.optim.Optimizer, what: str) -> None:
    if what == "parameter":
        model.last.weight[1, 2] += 1
    elif what == "memory":
        model.last.bias.data = model.last.bias.data.clone()
    elif what == "state":
        held = copy.deepcopy(optimizer.state_dict())
        held["state"][3]["exp_avg"] *= 2
        optimizer.load_state_dict(held)
    elif what == "no gradient":
        model.last.weight.grad = None
    else:
        model.last.weight.grad.mul_(2)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("parameter", r"Parameter last.weight of Net is not the same on all ranks before the step of optimizer 1 "),
        ("memory", r"A parameter was given other memory on some ranks of a host only"),
        (
            "state",
            r"The optimizer's state of second.bias of Net \(exp_avg\) is not the same on all ranks before the step of",
        ),
        (
            "gradient",
            r"The gradient of last.weight of Net is not the same on all ranks before the step of optimizer 1 ",
        ),
        ("no gradient", r"(?s)The gradient of last.weight of Net is not the same .*: none.*: norm "),
    ],
)
def test_what_one_rank_changes_alone_is_an_error_on_every_rank(what: str, words: str) -> None:
    for result in run_ranks(_changed_alone, 3, what):
        with pytest.raises(ReplicasDiffer, match=words):
            result.get()


# -- hooks ---------------------------------------------------------------------------------------------


def _hooked(world: World) -> Result:
    model = _replicated()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = {name: one.detach().clone() for name, one in model.named_parameters()}
    seen = []

    def before(optimizer: torch.optim.Optimizer, *_: object) -> None:
        seen.append(len(optimizer.param_groups[0]["params"]))
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    def after(optimizer: torch.optim.Optimizer, *_: object) -> None:
        seen.append(len(optimizer.param_groups[0]["params"]))
        with torch.no_grad():
            for name, one in model.named_parameters():
                average[name].lerp_(one, 0.5)

    optimizer.register_step_post_hook(after)
    for step, batch in enumerate(batches(SIZES)):
        if step == 2:
            optimizer.register_step_pre_hook(before)
        _loss(model, batch, world).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert set(seen) == {len(list(model.parameters()))}
    return average


def test_hooks_of_an_optimizer_see_all_parameters_before_and_after_its_step() -> None:
    _check_as_one_rank(_hooked, sizes=(3,))


def _stale_graph(world: World) -> str:
    model = _replicated()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = batches((12,))[0]
    loss = _loss(model, batch, world)
    _loss(model, batch, world).backward()
    optimizer.step()
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_graph_from_before_the_step_cannot_run_backward() -> None:
    for result in run_ranks(_stale_graph, 2):
        assert "modified by an inplace operation" in result.get()


# -- copies --------------------------------------------------------------------------------------------


class Asks(Dataset[torch.Tensor]):
    """Asks the model, in a worker of a loader."""

    def __init__(self, model: nn.Module, ready: int) -> None:
        self.model, self.ready = model, ready

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 2:
            # Until the ranks have stepped.
            os.read(self.ready, 1)
        return self.model.first.weight.detach().clone()


def _copied(world: World) -> bool:
    model = _replicated()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _loss(model, batches((12,))[0], world).backward()
    optimizer.step()
    before = model.first.weight.detach().clone()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    others = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]  # noqa: S301 - its own
    read, write = os.pipe()
    loader = iter(
        DataLoader(Asks(model, read), batch_size=1, num_workers=1, prefetch_factor=1, multiprocessing_context="fork")
    )
    first = next(loader)
    for batch in batches((12, 7)):
        optimizer.zero_grad()
        _loss(model, batch, world).backward()
        optimizer.step()
    os.write(write, b"1")
    assert not model.first.weight.equal(before)
    assert len(file.getvalue()) < 20000
    file.seek(0)
    return all(
        one.equal(before)
        for one in (
            first[0],
            *(one[0] for one in loader),
            torch.load(file)["first.weight"],
            *(one.first.weight for one in others),
        )
    )


def test_copies_pickles_and_workers_of_loaders_keep_their_values() -> None:
    assert [result.get() for result in run_ranks(_copied, 2)] == [True, True]


def _forked_twice(_: World) -> list[int]:
    """Fork, write into a parameter, and fork again before the next step."""
    model = _replicated()
    codes = []
    for value in (3.0, 5.0):
        with torch.no_grad():
            model.first.weight.fill_(value)
        with threads_are_known():
            child = os.fork()
        if child == 0:
            os._exit(int(model.first.weight[0, 0].item()))
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    return codes


def test_a_forked_process_has_what_was_written_just_before() -> None:
    assert [result.get() for result in run_ranks(_forked_twice, 2)] == [[3, 5]] * 2


def _after_the_world(world: World, fifo: Path) -> Result:
    model = _replicated()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for batch in batches((12, 7)):
        optimizer.zero_grad()
        _loss(model, batch, world).backward()
        optimizer.step()
    rw.leave()
    if world.rank == 1:
        with torch.no_grad():
            model.first.weight.add_(1)
        for one in model.parameters():
            one.grad = None if one.grad is None else one.grad * 2
        optimizer.step()
        fifo.write_text("stepped")
    elif world.world_size > 1:
        assert fifo.read_text() == "stepped"
    return _values(model, optimizer)


def test_each_rank_has_its_own_values_after_the_world_was_left(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reference = one_rank(_after_the_world, fifo)
    first, second = (result.get() for result in run_ranks(_after_the_world, 2, fifo))
    assert largest_difference(first, reference) < TOLERANCE
    assert not second["first.weight"].equal(first["first.weight"])
    assert second["0.step"].item() == first["0.step"].item() + 1


def _uneven_microsteps(world: World) -> Result:
    """Rank 0 has fewer microsteps than the others, and is at the step long before them."""
    model = _replicated()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches(SIZES):
        x, y = batch
        rows = range(len(x))[world.rank :: world.world_size]
        micro = [[*rows]] if world.rank == 0 else [[row] for row in rows] or [[]]
        for number, one in enumerate(micro):
            with rw.no_sync(model) if number < len(micro) - 1 else nullcontext():
                nn.functional.mse_loss(model(x[one]), y[one]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return _values(model, optimizer)


def test_ranks_may_accumulate_over_different_numbers_of_microsteps() -> None:
    _check_as_one_rank(_uneven_microsteps, sizes=(3,))


# -- failure -------------------------------------------------------------------------------------------


def _skips(world: World) -> None:
    model = _replicated()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, batch in enumerate(batches(SIZES)):
        _loss(model, batch, world).backward()
        if step != 3 or world.rank != 1:
            optimizer.step()
        optimizer.zero_grad()


def test_a_rank_that_leaves_out_a_step_is_named() -> None:
    for result in run_ranks(_skips, 3):
        with pytest.raises((CollectiveMismatch, PeerFailed), match="Rank 1 left out a step of the optimizer"):
            result.get()


def _steps_another(world: World) -> None:
    model = _replicated()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.Adam(model.parameters())]
    for step, batch in enumerate(batches(SIZES)):
        _loss(model, batch, world).backward()
        for optimizer in optimizers if step != 3 or world.rank else reversed(optimizers):
            optimizer.step()


def test_ranks_at_steps_of_different_optimizers_are_an_error() -> None:
    for result in run_ranks(_steps_another, 3):
        with pytest.raises(CollectiveMismatch, match="take steps of different optimizers"):
            result.get()


# -- refusals ------------------------------------------------------------------------------------------


def _refused(_: World, case: str) -> str:
    model: nn.Module = Net()
    arguments: dict[str, Any] = {"one_copy_per_host": True}
    if case == "compress":
        arguments["compress"] = "bf16"
    elif case == "place":
        rw.place(model, {"": "cpu"})
    elif case == "memory":
        model.second.bias.data = model.first.bias.data
    elif case == "room":
        model = nn.Linear(1000, 1000)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**21, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    elif case == "mesh":
        rw.mesh(dp_replicate=-1)
    try:
        rw.replicate(model, **arguments)
    except ConfigurationError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("compress", "compress= is for slow networks"),
        ("memory", "share memory"),
        ("mesh", "rankwise.mesh() arranged the ranks"),
        ("room", "there is too little shared memory"),
        ("", "accepted"),
    ],
)
def test_what_makes_it_impossible_is_named_where_it_is_wanted(case: str, words: str) -> None:
    for result in run_ranks(_refused, 2, case):
        assert words in result.get()


def test_gloo_makes_it_impossible() -> None:
    for result in run_ranks(_refused, 2, "", exchange="gloo"):
        assert "the ranks do not exchange through shared memory" in result.get()
