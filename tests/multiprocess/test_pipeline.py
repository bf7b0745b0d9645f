# SPDX-License-Identifier: Apache-2.0
"""A model in stages on several ranks computes what one device computes."""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from replicas import TOLERANCE, built, largest_difference
from staged_models import Skipping, difference, drawn, mean_square, own
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from rankwise.errors import ConfigurationError
from rankwise.pipeline.pipeline import pipeline
from rankwise.pipeline.schedule import SCHEDULES
from rankwise.replicate.device_mesh import mesh
from rankwise.tensor_parallel.tensor_parallel import tensor_parallel
from rankwise.testing import run_ranks

if TYPE_CHECKING:
    from on_ranks import RunRanks

    from rankwise.world.facts import World


class Images(nn.Module):
    """Convolutions with a skip across the middle, frozen beginning, strided values between blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1).requires_grad_(requires_grad=False)
        self.down = nn.Conv2d(4, 6, 2, stride=2)
        self.act = nn.ReLU(inplace=True)
        self.norm = nn.BatchNorm2d(6)
        self.up = nn.ConvTranspose2d(6, 4, 2, stride=2)
        self.last = nn.Conv2d(8, 2, 1)
        self.fc = nn.Linear(2 * 6 * 6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        top = self.stem(x.contiguous(memory_format=torch.channels_last))
        h = self.act(self.down(top)).permute(0, 2, 3, 1)
        h = self.up(self.norm(h.permute(0, 3, 1, 2)))
        return self.fc(self.last(torch.cat([top, h], 1)).flatten(1))


class Branching(nn.Module):
    """A branch of its own, blocks that do nothing, and a part of a tensor between stages."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.same, self.time = nn.Linear(4, 6), nn.Identity(), nn.Linear(4, 4)
        self.second, self.drop, self.last = nn.Linear(4, 4), nn.Dropout(0.0), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.same(self.first(x)[:, 1:5])
        t = self.time(time)
        h = self.drop(self.second(h))
        return {"t": t, "h": self.last(h * t)}


def branching_loss(output: dict[str, torch.Tensor], target: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return (output["h"] - target[0]).square().mean() + (output["t"] * target[1]).mean()


def _train_with_every_schedule(world: World) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for schedule in SCHEDULES:
        model = built(Skipping)
        if world.rank:
            with torch.no_grad():
                model.position.zero_()  # rank zero's counts
        one = built(Skipping)
        keys = list(model.state_dict())
        step = pipeline(model, mean_square, example=drawn(8, 6), micro_batches=4, schedule=schedule)
        optimizers = [torch.optim.Adam(each.parameters(), lr=0.05) for each in (model, one)]
        worst = 0.0
        for samples in (7, 3, 8):  # uneven, fewer than micro-batches, even
            x, y = drawn(samples, 6, seed=samples), drawn(samples, 3, seed=samples + 1)
            loss = step(x, y)
            expected = mean_square(one(x), y)
            expected.backward()
            assert not loss.requires_grad
            worst = max(worst, abs(loss.item() - expected.item()), difference(model, one))
            norm = nn.utils.clip_grad_norm_(one.parameters(), 0.1)
            worst = max(worst, float(step.clip_grad_norm_(0.1) - norm), difference(model, one))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        worst = max(worst, difference(model, one, "value"))
        model.eval()
        x = drawn(5, 6)
        worst = max(worst, float((step.predict(x) - one(x).detach()).abs().max()))
        assert list(model.state_dict()) == keys
        assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in one.parameters()]
        found[schedule] = worst, sorted(own(model, "value")), sorted(optimizers[0].state_dict()["state"])
    return found


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_training_is_that_of_one_device_with_every_schedule(run_ranks: RunRanks, num_ranks: int) -> None:
    results = [result.get() for result in run_ranks(_train_with_every_schedule, num_ranks)]
    names = sorted(name for name, _ in Skipping().named_parameters())
    for schedule in SCHEDULES:
        assert max(result[schedule][0] for result in results) <= TOLERANCE
        held = [name for result in results for name in result[schedule][1]]
        assert sorted(held) == names, "every parameter is on exactly one rank"
        numbers = [number for result in results for number in result[schedule][2]]
        assert len(numbers) == len(set(numbers)) == len(names) - 2, "optimizers number parameters alike; never has none"


class Wide(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 256), nn.Tanh(), nn.Linear(256, 3))


def _train_on_more_than_the_example(world: World) -> float:
    """Send more than fits the memory between the stages, between steps that fit."""
    model, one = built(Wide), built(Wide)
    step = pipeline(model, mean_square, example=drawn(2, 4), micro_batches=2, split=["2"])
    for samples in (2, 2000, 3):
        x, y = drawn(samples, 4, seed=samples), drawn(samples, 3, seed=1)
        step(x, y)
        mean_square(one(x), y).backward()
    return difference(model, one)


def test_batches_may_be_larger_than_the_example() -> None:
    assert max(result.get() for result in run_ranks(_train_on_more_than_the_example, 2)) <= TOLERANCE


def _train_images(world: World) -> list[float]:
    found = []
    for schedule in ("1f1b", "zbv_zero_bubble"):
        model = built(Images).eval()  # statistics per micro-batch would not be those of one device
        one = copy.deepcopy(model)
        split = ["act", "up"] if schedule == "1f1b" else ["down", "act", "norm", "up", "last"]
        step = pipeline(model, mean_square, example=drawn(6, 2, 6, 6), micro_batches=3, schedule=schedule, split=split)
        for samples in (5, 6):  # no zero_grad in between: the sum of both
            x, y = drawn(samples, 2, 6, 6, seed=samples), drawn(samples, 3)
            step(x, y)
            mean_square(one(x), y).backward()
        found.append(difference(model, one))
    model, one = built(Branching), built(Branching)
    x, target = (drawn(5, 4), drawn(5, 4, seed=2)), (drawn(5, 2, seed=3), drawn(5, 4, seed=4))
    split = ["same", "time", "second", "drop", "last"]
    step = pipeline(model, branching_loss, example=x, micro_batches=3, schedule="zbv_zero_bubble", split=split)
    step(x, target)
    branching_loss(one(*x), target).backward()
    assert all(parameter.is_meta or parameter.grad is not None for parameter in model.parameters())
    found.append(difference(model, one))
    predicted, expected = step.predict(x), one(*x)
    found.append(max(float((predicted[key] - expected[key].detach()).abs().max()) for key in expected))
    return found


def test_skips_branches_frozen_blocks_and_work_in_place_across_cuts() -> None:
    for result in run_ranks(_train_images, 3):
        assert max(result.get()) <= TOLERANCE


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=31, num_hidden_layers=3, **sizes))


def _token_loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.logits.flatten(0, 1), target.flatten(), ignore_index=-100)


def _num_tokens(target: torch.Tensor) -> torch.Tensor:
    return (target != -100).sum()


def _train_llama(world: World) -> list[float]:
    model, one = built(_llama), built(_llama)
    generator = torch.Generator().manual_seed(3)
    example = {"input_ids": torch.randint(0, 31, (4, 5), generator=generator), "use_cache": False}
    step = pipeline(model, _token_loss, example=example, micro_batches=3, weight=_num_tokens)
    found = []
    for samples in (5, 4):
        batch = {
            "input_ids": torch.randint(0, 31, (samples, 7), generator=generator),
            "attention_mask": torch.ones(samples, 7, dtype=torch.long).tril(2),
            "use_cache": False,
        }
        target = batch["input_ids"].roll(-1, 1).masked_fill(batch["attention_mask"] == 0, -100)
        loss = step(batch, target)
        expected = _token_loss(one(**batch), target)
        expected.backward()
        found += [abs(loss.item() - expected.item()), difference(model, one)]
    output = step.predict(batch)
    assert type(output).__name__ == "CausalLMOutputWithPast"
    found.append(float((output.logits - one(**batch).logits.detach()).abs().max()))
    return found


def test_a_transformers_model_with_a_loss_over_tokens() -> None:
    for result in run_ranks(_train_llama, 2):
        assert max(result.get()) <= TOLERANCE


class Normed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def _train_copies(world: World) -> tuple[float, list[float], float]:
    copy_number = world.rank % 2
    mesh(pp=2, dp_replicate=2)
    model, one = built(Skipping), built(Skipping)
    step = pipeline(model, mean_square, example=drawn(4, 6), micro_batches=2, schedule="interleaved_1f1b")
    losses = []
    worst = 0.0
    for sizes in ((5, 2), (3, 0)):  # the gradients of both add up
        whole, targets = drawn(sum(sizes), 6, seed=sizes[0]), drawn(sum(sizes), 3)
        x, y = whole.split(sizes)[copy_number], targets.split(sizes)[copy_number]
        losses.append(step(x, y).item())
        mean_square(one(whole), targets).backward()
        worst = max(worst, difference(model, one))
    step(drawn(0, 6), drawn(0, 3))  # nobody has samples: nothing is added
    worst = max(worst, difference(model, one))
    normed = built(Normed)
    step = pipeline(normed, mean_square, example=drawn(4, 6), micro_batches=1)
    for seed in (0, 1):
        step(drawn(4, 6, seed=seed + copy_number), drawn(4, 3))
    # The first copy's statistics count, and then its own last batch.
    alone = built(Normed)
    alone(drawn(4, 6, seed=0))
    alone(drawn(4, 6, seed=1 + copy_number))
    buffers = {name: buffer.double() for name, buffer in normed.named_buffers() if not buffer.is_meta}
    expected = {name: buffer.double() for name, buffer in alone.named_buffers() if name in buffers}
    return worst, losses, largest_difference(buffers, expected)


def test_copies_of_a_pipeline_average_over_all_their_samples() -> None:
    results = [result.get() for result in run_ranks(_train_copies, 4)]
    assert max(max(result[0], result[2]) for result in results) <= TOLERANCE
    for rank, (_, losses, _) in enumerate(results):
        assert losses[0] == results[rank % 2][1][0], "the loss of its own batch, on both stages"
        assert math.isnan(losses[1]) == bool(rank % 2), "nothing to take a mean of"


def _train_split_layers(world: World) -> float:
    mesh(pp=2, tp=2)
    model, one = built(Skipping), built(Skipping)
    with pytest.raises(ConfigurationError, match=r"rankwise.tensor_parallel\(model\) first"):
        pipeline(model, mean_square, example=drawn(4, 6))
    tensor_parallel(model, {"layers.*.first": "column", "layers.*.second": "row"})
    step = pipeline(model, mean_square, example=drawn(4, 6), micro_batches=3, schedule="zbv_zero_bubble")
    for samples in (5, 4):
        x, y = drawn(samples, 6, seed=samples), drawn(samples, 3)
        step(x, y)
        mean_square(one(x), y).backward()
    whole = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    found = {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in whole.items()}
    assert len(found) > 5
    expected = own(one)
    return largest_difference(found, {name: expected[name] for name in found})


def test_layers_that_are_split_over_ranks_go_into_stages() -> None:
    for result in run_ranks(_train_split_layers, 4):
        assert result.get() <= TOLERANCE


class Changing(nn.Module):
    """Reads a number that may change, makes a cache when it first runs, uses a layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = 1.0
        self.cache: torch.Tensor | None = None
        self.words = nn.Embedding(9, 6)
        self.layers = nn.ModuleList([Cached() for _ in range(4)])
        self.head = nn.Linear(6, 9)

    def forward(self, x: torch.Tensor, a: torch.Tensor | None = None, b: torch.Tensor | None = None) -> torch.Tensor:
        if self.cache is None:
            self.cache = torch.arange(6, dtype=torch.float64).cos()
        h = self.words(x) * self.cache
        if a is not None:
            h = h + a[:, None]
        if b is not None:
            h = h * b[:, None].cos()
        for layer in self.layers:
            h = layer(layer(h)) * self.temperature
        return self.head(h)


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "scale"):
            self.register_buffer("scale", torch.arange(6, dtype=x.dtype).sin(), persistent=False)
        return x + torch.tanh(self.linear(x)) * self.scale


def _logits_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-100)


def _train_changing(world: World) -> list[float]:
    x = torch.arange(24).view(6, 4) % 9
    target = x.clone()
    target[:2] = -100  # a micro-batch without a word
    batches: list[dict[str, torch.Tensor]] = [
        {"x": x},
        {"x": x, "a": drawn(6, 6), "b": drawn(6, 6, seed=2)},
        {"b": drawn(6, 6, seed=2), "x": x, "a": drawn(6, 6)},
        {"x": x, "a": drawn(6, 6)},
        {"x": x, "b": drawn(6, 6)},
    ]
    found = []
    for schedule in ("1f1b", "zbv_zero_bubble"):
        model, one = built(Changing), built(Changing)
        options = {"schedule": schedule, "micro_batches": 3, "weight": _num_tokens}
        step = pipeline(model, _logits_loss, example={"x": x}, **options)
        for number, batch in enumerate(batches):
            model.temperature = one.temperature = 1.0 / (1 + number)
            loss = step(batch, target)
            expected = _logits_loss(one(**batch), target)
            expected.backward()
            found += [abs(loss.item() - expected.item()), difference(model, one)]
    return found


def test_names_of_arguments_numbers_caches_and_micro_batches_of_no_weight() -> None:
    for result in run_ranks(_train_changing, 2):
        assert max(result.get()) <= TOLERANCE


class _TwoOutputs(nn.Module):
    """Whose second output other blocks of its stage need for the gradients of their weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(7)])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values = [x]
        for layer in self.layers:
            values.append(layer(values[-1]))
        return values[-1], values[3]


def _both(output: tuple[torch.Tensor, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(output[0], target) + output[1].square().mean()


def _with_two_outputs(world: World, schedule: str) -> float:
    mesh(pp=-1)
    cuts = [2, 5, 6] if world.world_size == 2 else [1, 2, 4, 5, 6]
    model, plain = _TwoOutputs().double(), _TwoOutputs().double()
    x, y = drawn(12, 4), drawn(12, 4, seed=2)
    split = [f"layers.{cut}" for cut in cuts]
    step = pipeline(model, _both, example=x, schedule=schedule, micro_batches=6, split=split)
    step(x, y)
    _both(plain(x), y).backward()
    return difference(model, plain)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("schedule", ["zbv_zero_bubble", "interleaved_zero_bubble"])
def test_a_second_output_within_a_stage_with_backward_in_two_parts(schedule: str, num_ranks: int) -> None:
    for result in run_ranks(_with_two_outputs, num_ranks, schedule):
        assert result.get() < 1e-12
