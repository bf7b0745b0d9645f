# SPDX-License-Identifier: Apache-2.0
"""Following a forward pass, cutting it into stages, and the order of a step, without ranks."""

from __future__ import annotations

import random
import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from rankwise.errors import ConfigurationError
from rankwise.pipeline.executor import (
    ActionSpan,
    MeasuredStep,
    micro_batch_sizes,
    num_samples,
    split_leaves,
    write_picture,
)
from rankwise.pipeline.pipeline import checked_count
from rankwise.pipeline.plan import block_costs
from rankwise.pipeline.schedule import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    RECEIVE_BACKWARD,
    RECEIVE_FORWARD,
    SCHEDULES,
    SEND_BACKWARD,
    SEND_FORWARD,
    Action,
    predicting_order,
    training_order,
)
from rankwise.pipeline.stage_executor import BoundStage
from rankwise.pipeline.stages import Stage, balanced, called_blocks, cut, owners, stages_of_blocks
from rankwise.pipeline.traced import trace
from rankwise.replicate.blocks import blocks

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rankwise.pipeline.stages import Program

CPU = torch.device("cpu")


def program_of(model: nn.Module, *args: Any, **kwargs: Any) -> Program:
    return trace(model, args, kwargs, blocks(model), CPU)


def names(stages: Sequence[Stage]) -> list[list[str]]:
    return [[str(call) for call in stage.calls] for stage in stages]


def staged(model: nn.Module, cuts: Sequence[int], *args: Any) -> list[Stage]:
    program = program_of(model, *args)
    return cut(program, stages_of_blocks(called_blocks(program), cuts), len(cuts) + 1)


def run(model: nn.Module, cuts: Sequence[int], x: torch.Tensor) -> torch.Tensor:
    """Run a model stage by stage, as its ranks would, and backward from the sum of its output."""
    program = program_of(model, x)
    stages = cut(program, stages_of_blocks(called_blocks(program), cuts), len(cuts) + 1)
    modules = {name: model.get_submodule(name) for name in blocks(model)}
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    bound = [BoundStage(stage, program, model, modules, weights, stage is stages[-1]) for stage in stages]
    sent: list[torch.Tensor] = []
    held = []
    for stage in bound:
        sent, kept = stage.forward([x], [value.detach() for value in sent])
        held.append(kept)
    output = held[-1].output
    held[-1].loss = output.sum()
    gradients: list[torch.Tensor | None] = []
    for stage, kept in zip(bound[::-1], held[::-1], strict=True):
        gradients = stage.backward(kept, gradients)
    return output


class Glue(nn.Module):
    """Functions between blocks: of inputs alone, of a parameter, random, in place, without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((4,), 0.5))
        self.register_buffer("offset", torch.ones(4))
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = (x > 0).to(x.dtype)
        steps = torch.arange(x.shape[0], device=x.device)[:, None]
        h = self.a(x) * self.scale
        with torch.no_grad():
            top = h.abs().max()
        first, second = self.b(h).split(2, dim=1)
        second = torch.cat([first, second], 1) / (top + 1)
        second += h
        second[:, 0] = 0.0
        kept = [row for row in second]  # noqa: C416 - iterating is what is tested
        return self.c(torch.stack(kept) * mask + self.offset * steps).flatten(1)


class PassingOn(nn.Module):
    """A value that the middle block uses and that the last ones need too."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        return self.d(torch.tanh(self.c(torch.tanh(self.b(h)))) * h)


def test_a_program_is_what_forward_calls() -> None:
    model = Glue()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.randn(3, 4)
    state = torch.get_rng_state()
    program = program_of(model, x)
    assert called_blocks(program) == ["a", "b", "c"]
    assert sorted(program.states.values()) == sorted(before)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model.a._forward_hooks
    assert not model.a._forward_pre_hooks
    assert torch.equal(state, torch.get_rng_state())
    no_grad = [str(call) for call in program.calls if not call.in_grad_mode]
    assert no_grad == ["abs", "max"]


@pytest.mark.parametrize(
    ("make", "cuts"), [(Glue, [1]), (Glue, [2]), (Glue, [1, 2]), (PassingOn, [1, 2]), (PassingOn, [1, 2, 3])]
)
def test_stages_one_after_the_other_are_the_model(make: type[nn.Module], cuts: list[int]) -> None:
    torch.manual_seed(0)
    model = make().double()
    x = torch.randn(5, 4, dtype=torch.float64)
    expected = model(x)
    expected.sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    assert torch.equal(run(model, cuts, x), expected)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-12, atol=0)


def test_values_of_the_inputs_alone_are_computed_where_needed_and_not_sent() -> None:
    stages = staged(Glue(), [1, 2], torch.randn(3, 4))
    calls = names(stages)
    assert [("gt" in each, "arange" in each) for each in calls] == [(False, False), (True, True), (False, False)]
    assert [len(stage.sends) for stage in stages] == [2, 1, 0], "h and its maximum, then one sum"
    assert [stage.receives for stage in stages[1:]] == [stage.sends for stage in stages[:-1]]


class Drawing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand_like(x)
        return self.b(self.a(x) + noise) * noise


def test_the_secret_is_drawn_once_and_sent() -> None:
    stages = staged(Drawing(), [1], torch.randn(3, 4))
    assert [calls.count("rand_like") for calls in names(stages)] == [1, 0]
    assert len(stages[0].sends) == 2


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


class Deciding(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[x.sum(1) > 0]


class Passing(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.a, self.b, self.t = nn.Linear(4, 4), nn.Linear(4, 4), nn.Tanh()
        self.register_buffer("count", torch.zeros(()))
        if what == "block":
            self.deciding = Deciding()

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # noqa: C901 - a branch per case
        h = self.a(x)
        if self.what == "value":
            h = h * h.sum().item()
        elif self.what == "shape":
            h = h[h[:, 0] > 0]
        elif self.what == "function":
            h = Doubled.apply(h)
        elif self.what == "input":
            x.mul_(2)
        elif self.what == "buffer":
            self.count = self.count + 1
        elif self.what == "again":
            h = self.a(self.b(h))
        elif self.what == "shared":
            return self.b(h) @ self.a.weight
        elif self.what == "view":
            top = h[:, :2]
            k = self.t(h)
            top.mul_(2)
            return self.b(k + h)
        elif self.what == "drawn":
            h = h * random.random()
        elif self.what == "block":
            return self.b(self.deciding(h))
        return self.b(h)


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("value", "depends on tensor values"),
        ("shape", "depends on tensor values"),
        ("function", "of unknown origin"),
        ("input", "changes an input of the model in place"),
        ("buffer", "forward replaces count"),
        ("view", "mul_ changes a tensor in place on stage 1 that stage 0 produced"),
        ("drawn", "random numbers from Python or NumPy between blocks"),
        ("block", "The control flow of the block deciding depends on tensor values"),
        ("again", "a is called on stage 0 after stage 1 has begun"),
    ],
)
def test_a_model_that_cannot_be_split_is_refused(what: str, expected: str) -> None:
    model = Passing(what)
    with pytest.raises(ConfigurationError, match=expected):
        staged(model, [1], torch.randn(3, 4))
    assert isinstance(model.count, torch.Tensor)
    assert type(model.count) is torch.Tensor
    model(torch.randn(3, 4))


def test_a_parameter_between_blocks_belongs_to_every_stage_that_reads_it() -> None:
    model = Passing("shared")
    program = program_of(model, torch.randn(3, 4))
    stage_of = stages_of_blocks(called_blocks(program), [1])
    found = owners(program, cut(program, stage_of, 2), [name for name, _ in model.named_parameters()], stage_of)
    assert found == {"a.weight": {0, 1}, "a.bias": {0}, "b.weight": {1}, "b.bias": {1}}


@pytest.mark.parametrize(
    ("costs", "num_stages", "together", "expected"),
    [
        ([1, 1, 1, 1], 2, [], [2]),
        ([5, 1, 1, 1, 1, 1], 2, [], [1]),
        ([1, 1, 1, 1, 4, 5], 3, [], [4, 5]),
        ([1, 1, 1, 1], 2, [(1, 3)], [1]),
        ([1, 2, 3], 1, [], []),
    ],
)
def test_cuts_balance_the_most_expensive_stage(
    costs: list[float], num_stages: int, together: list[tuple[int, int]], expected: list[int]
) -> None:
    assert balanced(costs, num_stages, together) == expected


def test_measuring_costs_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 64), nn.BatchNorm1d(64), nn.Dropout(), nn.ReLU(inplace=True), nn.Linear(64, 4))
    x = torch.randn(8, 4)
    program = program_of(model, x)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    costs = block_costs(program, model, [x], CPU)
    assert list(costs) == ["0", "1", "2", "3", "4"]
    assert all(seconds > 0 for seconds in costs.values())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


# -- the order of a step ----------------------------------------------------------------------------


def finish(orders: Sequence[Sequence[Action]], num_stages: int) -> set[Action]:
    """Run an order in which sends do not wait and receives wait for their send, and return the actions.

    Between two ranks, the n-th receive gets what was sent n-th.
    """
    done: set[Action] = set()
    sent: dict[tuple[int, int], list[Action]] = {}
    at = [0] * len(orders)
    rank_of = {action.stage: rank for rank, order in enumerate(orders) for action in order if action.kind == FORWARD}
    opposite = {RECEIVE_FORWARD: (SEND_FORWARD, -1), RECEIVE_BACKWARD: (SEND_BACKWARD, 1)}
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            if at[rank] == len(order):
                continue
            action = order[at[rank]]
            if action.kind in (SEND_FORWARD, SEND_BACKWARD):
                towards = rank_of[action.stage + (1 if action.kind == SEND_FORWARD else -1)]
                sent.setdefault((rank, towards), []).append(action)
            elif action.kind in opposite:
                kind, step = opposite[action.kind]
                waiting = sent.get((rank_of[action.stage + step], rank), [])
                if not waiting:
                    continue
                assert waiting.pop(0) == Action(kind, action.stage + step, action.micro_batch)
            elif action.kind == FORWARD and action.stage:
                before = Action(FORWARD, action.stage - 1, action.micro_batch)
                assert before in done
            elif action.kind in (BACKWARD, BACKWARD_INPUT):
                assert Action(FORWARD, action.stage, action.micro_batch) in done
                following = [Action(kind, action.stage + 1, action.micro_batch) for kind in (BACKWARD, BACKWARD_INPUT)]
                assert action.stage == num_stages - 1 or any(one in done for one in following)
            done.add(action)
            at[rank] += 1
            moved = True
    assert at == [len(order) for order in orders], "no rank waits for ever"
    return done


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_step_does_everything_once_and_ends(name: str) -> None:
    schedule = SCHEDULES[name]
    for num_ranks in (1, 2, 3, 4):
        num_stages = schedule.num_stages(num_ranks)
        for number in (1, 2, 3, 4, 6, 7, 8):
            if not schedule.allows(number, num_ranks):
                assert schedule.most(number, num_ranks) < number
                continue
            every = {(stage, one) for stage in range(num_stages) for one in range(number)}
            orders = training_order(name, num_ranks, number)
            done = finish(orders, num_stages)
            assert len(done) == sum(map(len, orders))
            for kinds in ((FORWARD,), (BACKWARD, BACKWARD_INPUT), (BACKWARD, BACKWARD_WEIGHT)):
                found = [(action.stage, action.micro_batch) for action in done if action.kind in kinds]
                assert sorted(found) == sorted(every)
            done = finish(predicting_order(name, num_ranks, number), num_stages)
            assert {(action.stage, action.micro_batch) for action in done if action.kind == FORWARD} == every
            assert all(
                schedule.rank_of(action.stage, num_ranks) == rank
                for rank, order in enumerate(orders)
                for action in order
            )


# -- batches and pictures ---------------------------------------------------------------------------


def test_a_batch_is_split_as_evenly_as_it_goes() -> None:
    assert micro_batch_sizes(7, 4) == [2, 2, 2, 1]
    x = {"a": torch.arange(7), "b": [torch.arange(14).view(7, 2), 3.0]}
    first, second = split_leaves(x, [4, 3])
    assert [len(first[0]), first[1].shape, first[2]] == [4, (4, 2), 3.0]
    assert torch.equal(torch.cat([first[0], second[0]]), x["a"])
    with pytest.raises(ConfigurationError, match="first dimensions: 2, 3"):
        num_samples([torch.ones(2), torch.ones(3)], "x")


def test_numbers_of_micro_batches_that_a_schedule_cannot_run_are_refused_with_the_nearest_it_can() -> None:
    assert [checked_count(None, SCHEDULES[name], 2) for name in ("1f1b", "interleaved_1f1b")] == [2, 4]
    assert checked_count(5, SCHEDULES["1f1b"], 2) == 5
    with pytest.raises(ConfigurationError, match="pass micro_batches=4 or 6"):
        checked_count(5, SCHEDULES["interleaved_1f1b"], 2)


def test_a_picture_shows_every_span_and_the_bubble(tmp_path: Path) -> None:
    spans = (
        ActionSpan(0, FORWARD, 0, 0, 0.0, 0.1),
        ActionSpan(1, FORWARD, 1, 0, 0.1, 0.2),
        ActionSpan(1, BACKWARD, 1, 0, 0.2, 0.4),
        ActionSpan(0, BACKWARD, 0, 0, 0.4, 0.6),
    )
    step = MeasuredStep("1f1b", 2, spans)
    assert step.bubble == pytest.approx(0.5)
    path = tmp_path / "schedule.svg"
    write_picture(step, path)
    root = ET.fromstring(path.read_text())  # noqa: S314 - our own text
    titles = [element.text for element in root.iter() if element.tag.endswith("title")]
    assert "backward, stage 1, micro-batch 0: 200 ms" in titles
    assert len(titles) == len(spans)
    texts = [element.text for element in root.iter() if element.tag.endswith("text")]
    # The title, the legend, a row per rank with the numbers of its micro-batches, and the axis of time.
    assert texts == [
        "1f1b: 2 stages on 2 ranks, 1 micro-batch, 600 ms, bubble 50%", "forward", "backward",
        "rank 0", "0", "0", "rank 1", "0", "0", "0 s", "150 ms", "300 ms", "450 ms", "600 ms",
    ]  # fmt: skip
    longer = MeasuredStep("1f1b", 1, (ActionSpan(0, FORWARD, 0, 0, 0.0, 3.14),))
    assert "3.14 s, bubble" in longer.title
    with pytest.raises(ConfigurationError, match="does not exist"):
        write_picture(step, tmp_path / "none" / "schedule.svg")
    with pytest.raises(ConfigurationError, match=r'draw\(\) writes \.svg[^"]*pass "schedule\.svg"'):
        write_picture(step, tmp_path / "schedule.png")


def test_a_picture_has_its_colors_inside(tmp_path: Path) -> None:
    path = tmp_path / "schedule.svg"
    write_picture(MeasuredStep("1f1b", 1, (ActionSpan(0, FORWARD, 0, 0, 0.0, 1.0),)), path)
    picture = path.read_text()
    light, dark = picture.partition("</style>")[0].split("@media (prefers-color-scheme: dark)")
    for rule in (".forward { fill: #", ".backward { fill: #", ".exchange { fill: #", ".optimizer { fill: #"):
        assert rule in light
        assert rule in dark
    assert "var(" not in picture
