# SPDX-License-Identifier: Apache-2.0
"""rankwise.tensor_parallel: ranks that share layers compute what one device computes, alone and with shard."""

from __future__ import annotations

import copy
import math
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
from replicas import TOLERANCE, built, largest_difference, part
from said import check_said, listening
from split_models import NUM_WORDS, Encoder, Gpt, Mlp, llama
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from rankwise import testing
from rankwise.data.loader import DataLoader
from rankwise.errors import CollectiveMismatch, ConfigurationError, PeerFailed
from rankwise.replicate.device_mesh import mesh
from rankwise.replicate.replicate import replicate
from rankwise.shard.shard import shard
from rankwise.tensor_parallel.tensor_parallel import plan_of, tensor_parallel

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.world.facts import World


def frozen_mlp() -> nn.Module:
    """An MLP of which the embedding, and one of the layers to split, are not trained."""
    model = Mlp()
    model.first.requires_grad_(False)
    model.get_submodule("layers.0.0").requires_grad_(False)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": Gpt,
    "llama": llama,
    "mlp": Mlp,
    "frozen mlp": frozen_mlp,
    "encoder": Encoder,
}
SIZES = (4, 3, 2)
SIZES_WITH_NONE = (4, 3, 1)
"""The last one leaves a rank without samples, which attention's own ``view`` does not take on one device either."""


def words(sizes: tuple[int, ...]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [
        (
            torch.randint(0, NUM_WORDS, (size, 5), generator=generator),
            torch.randint(0, NUM_WORDS, (size, 5), generator=generator),
        )
        for size in sizes
    ]


def logits_of(output: Any) -> torch.Tensor:
    return output.logits if hasattr(output, "logits") else output


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits_of(model(x)).flatten(0, 1), y.flatten())


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def training(model: nn.Module, rank: int = 0, count: int = 1) -> tuple[dict[str, torch.Tensor], list[float]]:
    sizes = SIZES_WITH_NONE if isinstance(model, Mlp) else SIZES
    # The bias of attention's keys has no effect: its gradient is rounding alone, and depends on the processor. AdamW's
    # usual eps, 1e-8, makes 1e-10 of it.
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-5, foreach=True)
    norms = []
    for x, y in words(sizes):
        loss_of(model, part(x, rank, count), part(y, rank, count)).backward()
        norms.append(whole(nn.utils.clip_grad_norm_(model.parameters(), 0.5)).item())
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        norms.append(logits_of(model(words(sizes)[0][0])).sum().item())
    return {name: whole(tensor) for name, tensor in model.state_dict().items()}, norms


def train(world: World, name: str, sizes: dict[str, int], plan: Any, sharded: dict[str, Any] | None) -> tuple[Any, ...]:
    axes = mesh(**sizes)
    model = built(MODELS[name])
    order = [key for key, _ in model.named_parameters()]
    kind = type(model)
    with torch.no_grad():
        next(model.parameters()).add_(world.rank)  # rank zero's start counts
    model = tensor_parallel(model, plan)
    assert type(model) is kind
    data_rank, data_size = 0, 1
    if sharded is not None:
        model = shard(model, **sharded)
        data_rank = axes["dp_replicate", "dp_shard"].get_local_rank("dp_replicate") * axes["dp_shard"].size()
        data_rank += axes.get_local_rank("dp_shard")
        data_size = axes["dp_replicate"].size() * axes["dp_shard"].size()
    parameters, norms = training(model, data_rank, data_size)
    assert order == [key for key, _ in model.named_parameters()]
    parts = [key for key, p in model.named_parameters() if any(q.is_shard() for q in p.placements)]
    return parameters, norms, parts, str(plan_of(model))


BY_HAND = {"layers.*.up": "column", "layers.*.down": "row", "layers.2": "replicate"}


@pytest.mark.parametrize(
    ("name", "sizes", "plan", "sharded"),
    [
        ("gpt", {"tp": 2}, "auto", None),
        ("llama", {"tp": 2}, "auto", None),
        ("encoder", {"tp": 2}, "auto", None),
        ("mlp", {"tp": 1}, "auto", None),
        ("mlp", {"tp": 3}, {"first": "vocab", "layers.0.0": "column", "layers.0.2": "row"}, None),
        ("frozen mlp", {"tp": 2}, {"layers.0.0": "column", "layers.0.2": "row"}, None),
        ("gpt", {"dp_shard": 2, "tp": 2}, "auto", {"recompute": True}),
        ("mlp", {"dp_shard": 2, "tp": 2}, "auto", {}),
    ],
)
def test_training_is_as_on_one_device(
    name: str, sizes: dict[str, int], plan: Any, sharded: dict[str, Any] | None
) -> None:
    expected, norms = training(built(MODELS[name]))
    world_size = 1
    for size in sizes.values():
        world_size *= size
    for result in testing.run_ranks(train, world_size, name, sizes, plan, sharded):
        parameters, own_norms, parts, _ = result.get()
        assert largest_difference(parameters, expected) <= TOLERANCE
        assert own_norms == pytest.approx(norms, rel=1e-10)
        assert parts


class Dropping(nn.Module):
    """Drops where activations are whole, and where each rank has a part: of a hidden width, and of the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 4
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))
        self.up, self.down, self.drop = nn.Linear(8, 12), nn.Linear(12, 8), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(x)
        q, k, v = (one(x).view(len(x), 3, self.heads, -1).transpose(1, 2) for one in (self.q, self.k, self.v))
        scores = self.drop((q @ k.transpose(-1, -2)).softmax(-1))
        x = x + self.drop(self.o((scores @ v).transpose(1, 2).reshape(len(x), 3, -1)))
        h = nn.functional.relu(self.up(x))
        return x + self.down(self.drop(h) + 0.1 * torch.randn_like(h)) * torch.bernoulli(x.sigmoid())


def dropping(world: World, sizes: dict[str, int], has_loader: bool) -> tuple[dict[str, torch.Tensor], float]:
    mesh(**sizes)
    torch.manual_seed(0)
    x = torch.randn(10, 3, 8, dtype=torch.float64)
    model = Dropping().double()
    tp = sizes.get("tp", 1)
    if tp > 1:
        plan = dict.fromkeys("qkv", "column") | {"o": "row", "up": "column", "down": "row"}
        tensor_parallel(model, plan)
        model.heads = 4 // tp
    if "dp_shard" in sizes:
        shard(model)
    elif tp < world.world_size or tp == 1:
        replicate(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for batch in DataLoader(x, global_batch_size=4) if has_loader else x.split(4):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: whole(tensor) for name, tensor in model.state_dict().items()}, torch.rand(()).item()


@pytest.mark.parametrize("has_loader", [True, False])
def test_dropout_is_drawn_as_on_one_device(has_loader: bool) -> None:
    expected, after = testing.run_ranks(dropping, 1, {}, has_loader)[0].get()
    meshes = [{"tp": 2}, {"tp": 4}, {"dp_replicate": 2, "tp": 2}, {"dp_shard": 2, "tp": 2}]
    for sizes in meshes if has_loader else meshes[:1]:
        for result in testing.run_ranks(dropping, math.prod(sizes.values()), sizes, has_loader):
            parameters, own_after = result.get()
            assert largest_difference(parameters, expected) <= TOLERANCE, sizes
            assert own_after == after


class DrawsByShape(nn.Module):
    """Draws for a part in a way that does not show where the part lies."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.up, self.down, self.kind = nn.Linear(4, 6), nn.Linear(6, 4), kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        if self.kind == "sizes":
            return self.down(h + torch.randn(h.shape))
        if self.kind == "values":
            return self.down(h * torch.bernoulli(h.sigmoid()))
        return self.down(h * nn.functional.dropout(h.sum(-1, keepdim=True), 0.5))


def unfollowed(_: World, kind: str) -> list[str]:
    mesh(tp=2)
    torch.manual_seed(0)
    model = tensor_parallel(DrawsByShape(kind), {"up": "column", "down": "row"})
    with listening() as said:
        try:
            model(torch.ones(2, 4))
        except ConfigurationError as error:
            return [str(error)]
    return said


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("sizes", "cannot tell which part of a split layer the random numbers at"),
        ("sums of parts", "cannot tell which part of a split layer the random numbers at"),
        ("values", "depend on the values of a layer that is split"),
    ],
)
def test_draws_for_a_part_that_cannot_be_placed_are_named(kind: str, text: str) -> None:
    said = testing.run_ranks(unfollowed, 2, kind)[0].get()
    check_said(said, [text])


class Noisy(nn.Module):
    """Draws its masks with a function, and keeps parameters in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(4))])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(nn.functional.relu(self.up(x))) * self.scales[0]
        return nn.functional.dropout(y, 0.5, self.training)


class Places(nn.Module):
    """A buffer of numbers that no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.mlp = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5))
        self.register_buffer("places", torch.arange(5), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.embed(x + self.places[: x.shape[1]] * 0))


def from_meta(_: World, strategy: str) -> tuple[list[str], float]:
    """Forward before anything is loaded, before a buffer is computed, and afterwards; without gradients."""
    mesh(**{"tp" if strategy == "tensor_parallel" else "dp_shard": 2})
    with torch.device("meta"):
        model = Places()
    model = tensor_parallel(model) if strategy == "tensor_parallel" else shard(model)
    x = torch.arange(4)[None]
    said = []

    @torch.no_grad()
    def forward() -> torch.Tensor:
        try:
            return model(x)
        except (ConfigurationError, PeerFailed) as error:
            said.append(str(error))
            return torch.empty(0)

    forward()
    source = built(Places).state_dict()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            whole_one = source[name].to(tensor.dtype)
            tensor.copy_(distribute_tensor(whole_one, tensor.device_mesh, tensor.placements, src_data_rank=None))
    forward()
    model.places.copy_(torch.arange(5))
    expected = built(Places).float()(x)
    outputs = [forward()]
    if strategy == "tensor_parallel":  # torch copies no sharded model
        outputs.append(copy.deepcopy(model)(x))
    return said, max((output - expected).abs().max().item() for output in outputs)


def refusals(world: World) -> list[str]:
    mesh(tp=2)
    said = []

    def refused(action: Callable[[], object]) -> None:
        try:
            action()
        except (CollectiveMismatch, ConfigurationError, PeerFailed) as error:
            said.append(str(error))

    model = tensor_parallel(built(Mlp))
    refused(lambda: tensor_parallel(model))
    refused(lambda: model(torch.full((2, 5), world.rank)))
    early = built(Mlp)
    optimizer = torch.optim.SGD(early.parameters(), 0.1)
    tensor_parallel(early)
    refused(lambda: early(torch.zeros(2, 5, dtype=torch.int64)))
    del optimizer
    refused(lambda: tensor_parallel(built(Mlp), "ato"))
    torch.manual_seed(world.rank)
    noisy = tensor_parallel(Noisy())
    noisy.eval()(torch.zeros(2, 4))  # draws nothing: ranks may be seeded as they like
    refused(lambda: noisy.train()(torch.zeros(2, 4)))
    refused(lambda: pickle.dumps(noisy))
    refused(lambda: tensor_parallel(built(Mlp), {}))
    refused(lambda: replicate(built(Mlp)))
    refused(lambda: shard(built(Mlp)))
    with torch.no_grad():
        if world.rank == 0:
            refused(lambda: noisy.eval()(torch.zeros(2, 4)))
    if world.rank == 1:
        refused(lambda: noisy.eval()(torch.zeros(2, 4)))
    return said


def test_impossible_arguments_are_refused_on_all_ranks() -> None:
    parts = [
        "The model has parameters that are already distributed over ranks",
        "Ranks that share layers received different inputs",
        "An optimizer (SGD) was created before tensor_parallel()",
        "Unknown plan 'ato' of tensor_parallel()",
        "drew different random numbers, for example for dropout masks",
        "split by tensor_parallel() cannot be pickled",
        "The plan of tensor_parallel() splits nothing",
        "replicate() was given a model that is not split: each of the 2 ranks along tp would have a copy",
        "shard() was given a model that is not split",
        "forward 3 of a tensor parallel Noisy, without gradients, in evaluation, float32[2, 4]",
    ]
    for result in testing.run_ranks(refusals, 2):
        check_said(result.get(), parts)


@pytest.mark.parametrize("strategy", ["tensor_parallel", "shard"])
def test_a_model_from_the_meta_device_runs_once_everything_is_filled(strategy: str) -> None:
    for result in testing.run_ranks(from_meta, 2, strategy):
        (unloaded, uncomputed), difference = result.get()
        assert f"embed.weight was on the meta device in {strategy}() and has not been initialized since" in unloaded
        assert "places was on the meta device" in uncomputed
        assert "compute it" in uncomputed
        assert difference < 1e-6
