# SPDX-License-Identifier: Apache-2.0
"""Losses that compare the samples of a batch, computed from ``whole_batch(outputs, gradients=True)`` on each rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from replicas import TOLERANCE, largest_difference
from said import check_said, listening
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import rankwise as rw
from rankwise import testing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from replicas import Parameters

    from rankwise.world.facts import World

    Tensor = torch.Tensor
    Whole = Callable[[Tensor], Tensor]
    Loss = Callable[["Net", Tensor, Tensor, Tensor, Whole], Tensor]

NUM_SAMPLES = 17
BATCH_SIZE = 8
"""The last batch has one sample: two of three ranks have none."""


class Net(nn.Module):
    """A model with a temperature of its own, as CLIP has."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4))
        self.temperature = nn.Parameter(torch.full((1,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class LossInside(Net):
    """The same, whose forward returns the loss."""

    def __init__(self, whole: Whole) -> None:
        super().__init__()
        self.whole = whole

    def forward(self, x: Tensor, other: Tensor) -> Tensor:  # type: ignore[override]
        return _simclr_of(self.whole(self.body(x)), self.whole(self.body(other)))


def _simclr_of(z: Tensor, other: Tensor) -> Tensor:
    rows = functional.normalize(torch.cat([z, other]), dim=1)
    similar = (rows @ rows.T / 0.5).fill_diagonal_(-1e9)
    number = torch.arange(len(z))
    return functional.cross_entropy(similar, torch.cat([number + len(z), number]))


def _simclr(net: Net, a: Tensor, b: Tensor, _: Tensor, whole: Whole) -> Tensor:
    return _simclr_of(whole(net(a)), whole(net(b)))


def _clip(net: Net, a: Tensor, b: Tensor, _: Tensor, whole: Whole) -> Tensor:
    rows, others = (functional.normalize(whole(net(one)), dim=1) for one in (a, b))
    similar = rows @ others.T * net.temperature.exp()
    number = torch.arange(len(rows))
    return (functional.cross_entropy(similar, number) + functional.cross_entropy(similar.T, number)) / 2


def _supcon(net: Net, a: Tensor, _: Tensor, y: Tensor, whole: Whole) -> Tensor:
    z, y = functional.normalize(whole(net(a)), dim=1), whole(y)
    similar = z @ z.T / 0.5
    same = (y[:, None] == y[None]).double().fill_diagonal_(0)
    others = similar.exp() * (1 - torch.eye(len(z), dtype=torch.float64))
    chances = similar - others.sum(1, keepdim=True).clamp_min(1e-9).log()
    return (-(same * chances).sum(1) / same.sum(1).clamp_min(1)).mean()


def _vicreg(net: Net, a: Tensor, b: Tensor, _: Tensor, whole: Whole) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    z = [whole(net(one)) for one in (a, b)]
    for one in z:
        centred = one - one.mean(0)
        spread = (centred.square().sum(0) / len(one) + 1e-4).sqrt()
        total = total + functional.relu(1 - spread).mean() + (centred.T @ centred / len(one)).triu(1).square().sum()
    return functional.mse_loss(*z) + total


def _mmd(net: Net, a: Tensor, b: Tensor, _: Tensor, whole: Whole) -> Tensor:
    rows, others = whole(net(a)), whole(net(b))

    def kernel(one: Tensor, other: Tensor) -> Tensor:
        return (-(one[:, None] - other[None]).square().sum(2)).exp().mean()

    return kernel(rows, rows) + kernel(others, others) - 2 * kernel(rows, others)


def _hardest(net: Net, a: Tensor, _: Tensor, y: Tensor, whole: Whole) -> Tensor:
    losses = whole(functional.cross_entropy(net(a), y, reduction="none"))
    return losses.topk(-(-len(losses) // 2)).values.mean()


def _rmse(net: Net, a: Tensor, b: Tensor, _: Tensor, whole: Whole) -> Tensor:
    return functional.mse_loss(whole(net(a))[:, :3], whole(b)).sqrt()


def _groups(net: Net, a: Tensor, _: Tensor, y: Tensor, whole: Whole) -> Tensor:
    losses, y = whole(functional.cross_entropy(net(a), y, reduction="none")), whole(y)
    of_classes = torch.stack([losses[y == one].mean() for one in y.unique()])
    return (of_classes.detach().softmax(0) * of_classes).sum()


def _with_a_mean(net: Net, a: Tensor, b: Tensor, y: Tensor, whole: Whole) -> Tensor:
    out = net(a)
    return (
        functional.cross_entropy(out, y)
        + 0.3 * _simclr_of(whole(out), whole(net(b)))
        + 0.1 * net.temperature.sum() ** 2
    )


LOSSES: dict[str, Loss] = {
    "simclr": _simclr,
    "clip": _clip,
    "supcon": _supcon,
    "vicreg": _vicreg,
    "mmd": _mmd,
    "hardest": _hardest,
    "rmse": _rmse,
    "groups": _groups,
    "with a mean": _with_a_mean,
}


def _dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(NUM_SAMPLES, 3, generator=generator, dtype=torch.float64)
    other = x + 0.3 * torch.randn(NUM_SAMPLES, 3, generator=generator, dtype=torch.float64)
    return TensorDataset(x, other, torch.randint(0, 4, (NUM_SAMPLES,), generator=generator))


def _train(net: Net, batches: Iterable[Sequence[Tensor]], name: str, whole: Whole) -> Parameters:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        for a, b, y in batches:
            loss = net(a, b) if isinstance(net, LossInside) else LOSSES[name](net, a, b, y, whole)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return {key: value.detach().clone() for key, value in parameters_of(net).items()}


def parameters_of(net: Net) -> Parameters:
    """Return the parameters, whole, of a replicated or sharded model."""
    return {key: getattr(one, "full_tensor", lambda one=one: one)() for key, one in net.state_dict().items()}


def _network(name: str, whole: Whole) -> Net:
    torch.manual_seed(0)
    return (LossInside(whole) if name == "inside" else Net()).double()


def _whole(own: Tensor) -> Tensor:
    return rw.whole_batch(own, gradients=True)


def _on_ranks(_: World, strategy: str, name: str) -> tuple[Parameters, list[str]]:
    loader = rw.DataLoader(_dataset(), global_batch_size=BATCH_SIZE)
    with listening() as said:
        found = _train(getattr(rw, strategy)(_network(name, _whole)), loader, name, _whole)
    return found, said


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize(
    ("strategy", "name"), [*(("replicate", name) for name in (*LOSSES, "inside")), ("shard", "clip")]
)
def test_a_loss_of_the_whole_batch_is_that_of_one_rank(strategy: str, name: str, num_ranks: int) -> None:
    expected = _train(_network(name, lambda one: one), DataLoader(_dataset(), BATCH_SIZE), name, lambda one: one)
    for result in testing.run_ranks(_on_ranks, num_ranks, strategy, name):
        found, said = result.get()
        assert largest_difference(found, expected) < TOLERANCE
        check_said(said, [])


def _half_gathered(_: World) -> list[str]:
    model = rw.replicate(_network("clip", _whole))
    a, b, _y = next(iter(rw.DataLoader(_dataset(), global_batch_size=BATCH_SIZE)))
    with listening() as said:
        functional.mse_loss(model(a), _whole(model(b))[: len(a)]).backward()
    return said


def test_samples_of_a_rank_next_to_those_of_all_are_named() -> None:
    said = [text for result in testing.run_ranks(_half_gathered, 2) for text in result.get()]
    check_said(said, ["because of rankwise.whole_batch() next to samples of this rank alone"])


def _penalized(_: World) -> list[str]:
    model = rw.replicate(_network("rmse", _whole))
    a, b, _y = next(iter(rw.DataLoader(_dataset(), global_batch_size=BATCH_SIZE)))
    loss = functional.mse_loss(_whole(model(a))[:, :3], rw.whole_batch(b))
    gradients = torch.autograd.grad(loss, model.body.parameters(), create_graph=True)
    with listening() as said:
        (loss + sum(one.square().sum() for one in gradients)).backward()
    return said


def test_gradients_of_parameters_by_a_rank_are_not_taken_for_the_whole_batchs() -> None:
    said = [text for result in testing.run_ranks(_penalized, 2) for text in result.get()]
    check_said(said, ["is neither a mean nor a sum over samples because of"])
