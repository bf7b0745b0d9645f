# SPDX-License-Identifier: Apache-2.0
"""`replicate` with sparse gradients: N ranks compute what one rank computes, whichever rows each of them uses."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch
from replicas import TOLERANCE, Parameters, largest_difference, part
from torch import nn
from torch.nn import functional

import rankwise as rw
from rankwise import testing
from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from on_ranks import RunRanks

    from rankwise.world.facts import World

    Words = tuple[torch.Tensor, torch.Tensor]
    """Words [batch, 3] and targets [batch, 2]."""
    NoSync = Callable[[nn.Module], AbstractContextManager[None]]
    Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # of Adagrad

SIZES = (9, 4, 2, 1, 7)
"""Of the global batches: two of them leave ranks without samples."""
NUM_WORDS = 12


class _Factors(nn.Module):
    """A factorization: only sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(NUM_WORDS, 2, sparse=True)
        self.items = nn.Embedding(NUM_WORDS, 2, sparse=True, padding_idx=0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.users(x[:, 0]) * self.items(x[:, 1])


class _Text(nn.Module):
    """A bag of words under a dense layer, and an embedding that only some batches use."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(NUM_WORDS, 4, sparse=True, mode="mean")
        self.rare = nn.Embedding(NUM_WORDS, 4, sparse=True)
        self.never = nn.Embedding(3, 4, sparse=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.bag(x)
        marked = (x == 1).any(1).nonzero()[:, 0]
        if len(marked):
            h = h.index_add(0, marked, self.rare(x[marked, 2]))
        return self.head(torch.tanh(h))


class _Hooked(_Factors):
    """Gradients that hooks halve and clip."""

    def __init__(self) -> None:
        super().__init__()
        self.users.weight.register_hook(lambda gradient: gradient * 0.5)
        self.items.weight.register_hook(_clipped)


def _clipped(gradient: torch.Tensor) -> torch.Tensor:
    rows = gradient.coalesce()
    values = rows.values().clamp(-0.02, 0.02)
    return torch.sparse_coo_tensor(rows.indices(), values, rows.shape, check_invariants=False)


class _Tied(nn.Module):
    """A weight that is used by words, and as a matrix: its gradient is dense."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(NUM_WORDS, 2, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.words(x).sum(1)
        marked = (x == 1).any(1).nonzero()[:, 0]
        return h.index_add(0, marked, (h[marked] @ self.words.weight.T)[:, :2]) if len(marked) else h


def _batches() -> list[Words]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randint(0, NUM_WORDS, (size, 3), generator=generator),
            torch.randn(size, 2, generator=generator, dtype=torch.float64),
        )
        for size in SIZES
    ]


def _sparse_adam(model: nn.Module) -> list[torch.optim.Optimizer]:
    embeddings = [one.weight for one in model.modules() if isinstance(one, nn.Embedding | nn.EmbeddingBag)]
    kept = {id(one) for one in embeddings}
    rest = [one for one in model.parameters() if id(one) not in kept]
    sparse: list[torch.optim.Optimizer] = [torch.optim.SparseAdam(embeddings, lr=0.1)]
    return [*sparse, torch.optim.Adam(rest, lr=0.01)] if rest else sparse


def _sgd(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.05)]


def _adagrad(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adagrad(model.parameters(), lr=0.1)]


def _as_it_is(model: nn.Module, x: torch.Tensor, y: torch.Tensor, loss: Loss, _: NoSync | None) -> None:
    loss(model(x), y).backward()


def _twice(model: nn.Module, x: torch.Tensor, y: torch.Tensor, loss: Loss, _: NoSync | None) -> None:
    loss(model(x), y).backward()
    (0.3 * loss(model(x.flip(1)), y)).backward()


def _accumulated(model: nn.Module, x: torch.Tensor, y: torch.Tensor, loss: Loss, no_sync: NoSync | None) -> None:
    """Take microsteps of unequal sizes, some of them empty; the plain script takes the batch at once."""
    pieces = [0, len(x)] if no_sync is None else [0, 1, 1, len(x)]
    for number, (begin, end) in enumerate(pairwise(pieces)):
        with no_sync(model) if no_sync is not None and number < len(pieces) - 2 else nullcontext():
            loss(model(x[begin:end]), y[begin:end]).backward()


def _two_terms(o: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(o, t) + 0.01 * o.square().sum()


def _masked(o: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    mask = t > 0
    return ((o - t) ** 2 * mask).sum() / mask.sum().clamp_min(1)


def _summed(o: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(o, t, reduction="sum")


Make = type[nn.Module]
CASES: dict[str, tuple[Make, Any, Any, Loss]] = {
    "factors": (_Factors, _sparse_adam, _as_it_is, functional.mse_loss),
    "factors, sum": (_Factors, _sgd, _as_it_is, _summed),
    "factors, two terms": (_Factors, _adagrad, _twice, _two_terms),
    "text": (_Text, _sparse_adam, _as_it_is, functional.mse_loss),
    "text, two backwards": (_Text, _sgd, _twice, functional.mse_loss),
    "text, two sums": (_Text, _sgd, _twice, _summed),
    "text, two terms": (_Text, _sparse_adam, _as_it_is, _two_terms),
    "text, masked": (_Text, _adagrad, _as_it_is, _masked),
    "text, accumulated": (_Text, _sgd, _accumulated, functional.mse_loss),
    "text, accumulated sum": (_Text, _sgd, _accumulated, _summed),
    "factors, accumulated": (_Factors, _sparse_adam, _accumulated, functional.mse_loss),
    "hooked": (_Hooked, _sgd, _as_it_is, functional.mse_loss),
    "tied": (_Tied, _sgd, _as_it_is, functional.mse_loss),
    "tied, two backwards": (_Tied, _sgd, _twice, functional.mse_loss),
}


def _train(name: str, rank: int, of: int, *, is_plain: bool = False) -> Parameters:
    make, optimizers_of, step, loss = CASES[name]
    torch.manual_seed(0)
    model = make().double() if is_plain else rw.replicate(make().double())
    optimizers: Sequence[torch.optim.Optimizer] = optimizers_of(model)
    for x, y in _batches():
        for one in optimizers:
            one.zero_grad()
        step(model, part(x, rank, of), part(y, rank, of), loss, None if is_plain else rw.no_sync)
        for one in optimizers:
            one.step()
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


def _on_ranks(world: World) -> dict[str, Parameters]:
    return {name: _train(name, world.rank, world.world_size) for name in CASES}


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_sparse_gradients_are_exact(run_ranks: RunRanks, num_ranks: int) -> None:
    plain = {name: _train(name, 0, 1, is_plain=True) for name in CASES}
    for result in run_ranks(_on_ranks, num_ranks):
        apart = {name: largest_difference(got, plain[name]) for name, got in result.get().items()}
        assert {name: value for name, value in apart.items() if value > TOLERANCE} == {}


def _layers() -> nn.Module:
    torch.manual_seed(0)
    words = nn.Embedding(NUM_WORDS, 4, sparse=True)
    return nn.Sequential(words, nn.Flatten(), nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def _descend(model: nn.Module, step: Callable[[torch.Tensor, torch.Tensor], object], rank: int, of: int) -> Parameters:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for x, y in _batches():
        optimizer.zero_grad()
        for _ in range(2):
            step(part(x, rank, of), part(y, rank, of))
        optimizer.step()
    return {key: value.detach().clone() for key, value in model.state_dict().items() if not value.is_meta}


def _plain_layers() -> Parameters:
    model = _layers()
    return _descend(model, lambda x, y: functional.mse_loss(model(x), y).backward(), 0, 1)


def _staged(world: World) -> Parameters:
    rw.mesh(pp=2, dp_replicate=2)
    model = _layers()
    step = rw.pipeline(model, functional.mse_loss, example=_batches()[0][0], micro_batches=2)
    return _descend(model, step, world.rank % 2, 2)


def test_sparse_gradients_of_a_pipelines_copies_are_exact() -> None:
    plain = _plain_layers()
    for result in testing.run_ranks(_staged, 4):
        got = result.get()
        assert largest_difference(got, {key: plain[key] for key in got}) <= TOLERANCE


def _refused(_: World, strategy: str) -> None:
    if strategy == "tensor_parallel":
        rw.mesh(tp=2)
        rw.tensor_parallel(_layers())
    else:
        rw.shard(_layers())


@pytest.mark.parametrize("strategy", ["shard", "tensor_parallel"])
def test_strategies_that_split_parameters_refuse_sparse_gradients(strategy: str) -> None:
    for result in testing.run_ranks(_refused, 2, strategy):
        assert isinstance(result.error, ConfigurationError)
        assert "Parameter 0.weight has a sparse gradient" in str(result.error)
        assert "rankwise.replicate(model)" in str(result.error)
