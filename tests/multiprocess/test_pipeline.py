# SPDX-License-Identifier: Apache-2.0
"""A model in stages on several ranks computes what one device computes."""

from __future__ import annotations

import copy
import math
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from replicas import TOLERANCE, largest_difference
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

import rankwise as rw
from rankwise.errors import CollectiveMismatch, ConfigurationError, PeerFailed
from rankwise.parallel.device_mesh import mesh
from rankwise.parallel.pipeline.calls import Pipeline, pipeline
from rankwise.parallel.pipeline.schedule import SCHEDULES
from rankwise.parallel.tensor.calls import tensor_parallel
from rankwise.parallel.trained import no_sync
from rankwise.testing import RankDied, kill_self, run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.world import World

FAILING_SECONDS = 8.0
BAD = 100.0
mean_square = functional.mse_loss


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.first = nn.Linear(width, 2 * width)
        self.second = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.tanh(self.first(self.norm(x))))


class Skipping(nn.Module):
    """A parameter and glue between blocks, a value that skips most stages, a block that works in place."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.ones(6))
        self.layers = nn.ModuleList([Residual(6) for _ in range(7)])
        self.act = nn.ReLU(inplace=True)
        self.never = nn.Linear(2, 2)
        self.head = nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = x + self.position
        scale = 1.0 + x.abs().mean(1, keepdim=True)
        h = skip
        for layer in self.layers:
            h = layer(h) / scale
        return self.head(torch.cat([h, self.act(skip * 1.5)], 1).view(x.shape[0], -1))


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


def built(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().double()


def drawn(*sizes: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def own(model: nn.Module, what: str = "grad") -> dict[str, torch.Tensor]:
    """Return the gradients or values of the parameters that are on this rank."""
    return {
        name: parameter.grad if what == "grad" else parameter.detach()
        for name, parameter in model.named_parameters()
        if parameter.device.type != "meta" and (what != "grad" or parameter.grad is not None)
    }


def difference(model: nn.Module, one: nn.Module, what: str = "grad") -> float:
    """Return how far this rank's parameters are from those of the model on one device."""
    found, expected = own(model, what), own(one, what)
    return largest_difference(found, {name: expected[name] for name in found})


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
def test_training_is_that_of_one_device_with_every_schedule(num_ranks: int) -> None:
    results = [result.get() for result in run_ranks(_train_with_every_schedule, num_ranks)]
    names = sorted(name for name, _ in Skipping().named_parameters())
    for schedule in SCHEDULES:
        assert max(result[schedule][0] for result in results) <= TOLERANCE
        held = [name for result in results for name in result[schedule][1]]
        assert sorted(held) == names, "every parameter is on exactly one rank"
        numbers = [number for result in results for number in result[schedule][2]]
        assert len(numbers) == len(set(numbers)) == len(names) - 2, "optimizers number parameters alike; never has none"


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


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.middle = nn.Sequential(Residual(4), Residual(4))
        self.last = nn.Linear(4, 4)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x)))


class Deciding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        return self.second(h) if h.sum() > 0 else h


REFUSALS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "unknown name": (Skipping, {"split": ["layer.3"]}, "layers.3"),
    "within a block": (
        Skipping,
        {"split": ["layers.3.second"]},
        "cut before 'layers.3', or after it: before 'layers.4'",
    ),
    "not called": (Skipping, {"split": ["never"]}, "not called"),
    "empty stage": (Skipping, {"split": ["layers"]}, "would hold no block"),
    "one name": (Skipping, {"split": "layers.33"}, "layers.3"),
    "no name": (Skipping, {"split": [2]}, "names of modules, not 2"),
    "no loss": (Skipping, {"loss_fn": None}, "loss_fn must be a function"),
    "no weight": (Skipping, {"weight": 3}, "weight must be a function"),
    "wrong example": (Skipping, {"example": drawn(4, 5)}, "float64[2, 5] on cpu"),
    "too many cuts": (Skipping, {"split": ["layers.1", "layers.2"]}, "2 stages need 1"),
    "unknown schedule": (Skipping, {"schedule": "1F1B"}, 'schedule="1f1b"'),
    "micro-batches": (
        Skipping,
        {"schedule": "interleaved_1f1b", "micro_batches": 5},
        "pass micro_batches=4 or 6",
    ),
    "no micro-batches": (Skipping, {"micro_batches": 0}, "at least 1"),
    "tied": (Tied, {"split": ["middle.1"]}, "first.weight = last.weight is used on stages 0, 1"),
    "tied, by cost": (Tied, {}, "shared: first.weight = last.weight"),
    "one block": (partial(nn.Linear, 4, 4), {}, "1 blocks, and there are 2 stages"),
    "depends on values": (Deciding, {}, "depends on values"),
}


def _refused(world: World) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for what, (make, options, _) in REFUSALS.items():
        model = built(make)
        x = drawn(8, 6 if make is Skipping else 4)
        before = copy.deepcopy(model.state_dict())
        try:
            pipeline(model, **{"loss_fn": mean_square, "example": x, **options})
        except ConfigurationError as error:
            found[what] = [str(error)]
        assert largest_difference(model.state_dict(), before) == 0.0
        assert not any(parameter.is_meta for parameter in model.parameters())
        model(x)
    model = built(Skipping)
    step = pipeline(model, mean_square, example=drawn(8, 6))
    for call in (
        lambda: model(drawn(8, 6)),
        lambda: pipeline(model, mean_square, example=drawn(8, 6)),
        lambda: rw.replicate(model),
        lambda: step(drawn(8, 6), drawn(7, 3)),
        lambda: step(drawn(0, 6), drawn(0, 3)),
        lambda: step.draw("schedule.svg"),
        lambda: no_sync(model).__enter__(),
    ):
        with pytest.raises(ConfigurationError) as caught:
            call()
        found.setdefault("afterwards", []).append(str(caught.value))
    return found


def test_what_cannot_be_is_refused_on_every_rank_before_anything_changes() -> None:
    for result in run_ranks(_refused, 2):
        found = result.get()
        for what, (_, _, expected) in REFUSALS.items():
            assert expected in found[what][0], what
        afterwards = [
            "its predict()",
            "once per model",
            "pipeline() already",
            "8 samples, and target has 7",
            "no samples",
            "step.measure()",
            "no_sync() is not for",
        ]
        for text, expected in zip(found["afterwards"], afterwards, strict=True):
            assert expected in text


def _refuse_shards(world: World) -> str:
    mesh(pp=2, dp_shard=2)
    with pytest.raises(ConfigurationError) as caught:
        pipeline(built(Skipping), mean_square, example=drawn(4, 6))
    return str(caught.value)


def test_sharded_stages_are_refused_with_the_nearest_mesh() -> None:
    for result in run_ranks(_refuse_shards, 4):
        assert "rankwise.mesh(pp=2, dp_replicate=2, tp=1)" in result.get()


DIFFERENT: dict[str, tuple[list[dict[str, Any]], str]] = {
    "split": ([{"split": ["layers.2"]}, {"split": ["layers.3"]}], 'rank 0: {"micro_batches": 2'),
    "schedule": ([{"schedule": "gpipe"}, {"schedule": "1f1b"}], '"schedule": "1f1b"'),
    "micro-batches": ([{"micro_batches": 2}, {"micro_batches": 3}], '"micro_batches": 3'),
}


def _mixed_up(world: World, folder: str) -> None:
    for options, expected in DIFFERENT.values():
        with pytest.raises(ConfigurationError, match=expected):
            pipeline(built(Skipping), mean_square, example=drawn(8, 6), **options[world.rank])
    model = built(Skipping)
    before = torch.optim.SGD(model.parameters(), lr=0.1)
    step = pipeline(model, mean_square, example=drawn(8, 6))
    with pytest.raises(ConfigurationError, match="An optimizer \\(SGD\\) was built before pipeline"):
        step(drawn(8, 6), drawn(8, 3))
    before.param_groups.clear()
    with pytest.raises(ConfigurationError, match="given different batches"):
        step(drawn(8, 6, seed=world.rank), drawn(8, 3))
    with pytest.raises(CollectiveMismatch, match=r"x=float64\[7, 6\]"):
        step(drawn(8 - world.rank, 6), drawn(8 - world.rank, 3))
    with pytest.raises(CollectiveMismatch, match=r"x=float64\[7, 6\]"):
        step.predict(drawn(8 - world.rank, 6))
    with pytest.raises(ConfigurationError, match="cannot be called with this batch"):
        step(drawn(8, 5), drawn(8, 3))
    with pytest.raises(ConfigurationError, match="at least zero"):
        step.clip_grad_norm_(-1.0)
    one = built(Skipping)
    step(drawn(8, 6), drawn(8, 3))
    mean_square(one(drawn(8, 6)), drawn(8, 3)).backward()
    assert difference(model, one) <= TOLERANCE
    model.load_state_dict(built(Skipping).state_dict())  # what other ranks hold is passed over, without a warning
    # From the meta device: nothing is trained before it is filled.
    path = f"{folder}/whole.safetensors"
    rw.save_weights(path, one)
    with torch.device("meta"):
        model = Skipping().double()
    step = pipeline(model, mean_square, example=drawn(8, 6), schedule="zbv_zero_bubble")
    with pytest.raises(ConfigurationError, match=r"(have|has) not been filled since"):
        step(drawn(8, 6), drawn(8, 3))
    rw.load_weights(path, model)
    step(drawn(8, 6), drawn(8, 3))
    assert difference(model, one) <= TOLERANCE


def test_ranks_that_do_different_things_are_told_and_can_go_on(tmp_path: Any) -> None:
    for result in run_ranks(_mixed_up, 2, str(tmp_path)):
        result.get()


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


class Failing(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 3 and x.device.type == "cpu" and type(x) is torch.Tensor:
            if self.how == "die":
                kill_self()
            message = "the layer is bad"
            raise ValueError(message)
        return x


def _fail(world: World, how: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), Failing(how), nn.Linear(4, 4)).double()
    step = pipeline(model, mean_square, example=drawn(4, 4), micro_batches=2, split=["1", "2"])
    step(drawn(4, 4), drawn(4, 4))
    started = time.monotonic()
    try:
        step(drawn(6, 4), drawn(6, 4))
    except PeerFailed as error:
        error.add_note(f"after {time.monotonic() - started} s")
        raise


def test_a_rank_that_fails_ends_the_step_on_every_rank() -> None:
    *others, failed = run_ranks(_fail, 3, "raise")
    assert isinstance(failed.error, ValueError)
    assert any("in the forward of stage 2, micro-batch 0" in note for note in failed.error.__notes__)
    for result in others:
        assert isinstance(result.error, PeerFailed)
        assert "the layer is bad" in str(result.error)
        waited = next(note for note in result.error.__notes__ if note.startswith("after "))
        assert float(waited.split()[1]) < FAILING_SECONDS


def _skip_a_loss(world: World) -> None:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if target[0, 0] > BAD:
            message = "bad target"
            raise FloatingPointError(message)
        return mean_square(output, target)

    step = pipeline(built(Skipping), loss, example=drawn(4, 6), micro_batches=2)
    try:
        step(drawn(4, 6), drawn(4, 3) + 2 * BAD)
    except FloatingPointError:
        step(drawn(4, 6), drawn(4, 3))


def test_a_step_that_broke_off_cannot_be_skipped() -> None:
    waiting, skipping = run_ranks(_skip_a_loss, 2)
    assert isinstance(waiting.error, PeerFailed)
    assert "bad target" in str(waiting.error)
    assert isinstance(skipping.error, ConfigurationError)
    assert "broke off" in str(skipping.error)


def test_a_rank_that_dies_ends_the_step_on_every_rank() -> None:
    *others, dead = run_ranks(_fail, 3, "die")
    assert isinstance(dead.error, RankDied)
    for result in others:
        assert result.error is not None
        assert "2" in str(result.error).splitlines()[0], "names the rank that is gone"


def _measure(world: World, folder: str) -> tuple[float | None, list[Any], str]:
    model = built(Skipping)
    step: Pipeline = pipeline(model, mean_square, example=drawn(8, 6), schedule="interleaved_zero_bubble")
    with step.measure():
        step(drawn(8, 6), drawn(8, 3))
    step.draw(f"{folder}/schedule.svg")
    step.draw(f"{folder}/schedule.png")
    return step.bubble, step.stages, str(step)


def test_a_measured_step_is_drawn(tmp_path: Any) -> None:
    first, second = (result.get() for result in run_ranks(_measure, 2, str(tmp_path)))
    assert first == second
    assert first[0] is not None
    assert 0.0 < first[0] < 1.0
    assert [(stage.number, stage.rank) for stage in first[1]] == [(0, 0), (1, 1), (2, 0), (3, 1)]
    assert sum(stage.cost_share for stage in first[1]) == pytest.approx(1.0)
    picture = (tmp_path / "schedule.svg").read_text()
    assert picture.count("<title>forward, stage") == 4 * 4
    assert picture.count("<title>backward of weights, stage") == 4 * 4
    assert (tmp_path / "schedule.png").read_bytes().startswith(b"\x89PNG")
