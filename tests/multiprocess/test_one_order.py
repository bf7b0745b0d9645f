# SPDX-License-Identifier: Apache-2.0
"""Collectives of several communicators on a device that needs one order of them, as NCCL does, on every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from on_standin import build_standin, on_standin
from test_promise import TOLERANCE, Parameters, largest_difference
from torch import nn

import rankwise as rw
from rankwise.comm.backends import torch_group
from rankwise.comm.session import current
from rankwise.errors import ConfigurationError
from rankwise.replicate import gradient_buckets
from rankwise.testing import run_ranks

if TYPE_CHECKING:
    from rankwise.world.facts import World

pytestmark = pytest.mark.timeout(180)  # the first of these tests may have to compile the device
NUM_STEPS = 4
WIDTH = 32


@pytest.fixture(scope="module", autouse=True)
def _standin_is_built() -> None:
    build_standin(strict=True)


class Net(nn.Module):
    """Layers before, between and after BatchNorm; one that only some ranks use."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.other_norm = nn.BatchNorm1d(WIDTH)
        self.odd = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, *, uses_odd: bool) -> torch.Tensor:
        x = torch.tanh(self.norm(self.first(x)))
        x = torch.tanh(self.other_norm(self.middle(x)))
        return self.last(self.odd(x) if uses_odd else x)


def _one_bucket_per_layer() -> None:
    gradient_buckets.FIRST_BUCKET_BYTES = torch_group.OTHER_CHANNEL_BYTES = torch_group.CPU_CHANNEL_BYTES = 64


def _train(world: World, user: int, compress: str | None) -> tuple[Parameters, list[str]]:
    """Train on each rank's own samples.

    Returns:
        The parameters, and what the last step issued in backward, in order.
    """
    _one_bucket_per_layer()
    torch.manual_seed(0)
    model = rw.replicate(Net().double().to(world.device), sync_batchnorm=True, compress=compress)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(world.rank)
    detector = current().detector
    assert detector is not None
    issued: list[str] = []
    ticket = detector.ticket

    def noting(what: str, *args: Any) -> Any:
        issued.append(what)
        return ticket(what, *args)

    detector.ticket = noting  # type: ignore[method-assign]
    for _ in range(NUM_STEPS):
        x = torch.randn(5, WIDTH, generator=generator, dtype=torch.float64).to(world.device)
        loss = model(x, uses_odd=world.rank == user).square().mean()
        issued.clear()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {key: value.cpu() for key, value in model.state_dict().items()}, issued


@pytest.mark.parametrize(("world_size", "user", "compress"), [(2, 0, None), (3, 1, None), (2, 0, "powersgd")])
def test_batchnorm_and_a_layer_that_one_rank_uses(world_size: int, user: int, compress: str | None) -> None:
    expected, _ = run_ranks(_train, world_size, user, compress, exchange="gloo")[0].get()
    for parameters, _ in on_standin(_train, world_size, user, compress, backend="strict"):
        assert largest_difference(parameters, expected) < TOLERANCE


def test_buckets_are_sent_while_backward_runs() -> None:
    for _, issued in on_standin(_train, 2, 0, None, backend="strict"):
        names = [what for what in issued if "BatchNorm gradients" in what or "bucket" in what]
        last = max(position for position, what in enumerate(names) if "BatchNorm" in what)
        assert any("bucket" in what for what in names[:last]), names


def _two_models(world: World) -> Parameters:
    """Go through two models in one backward, in another order on every rank."""
    _one_bucket_per_layer()
    torch.manual_seed(0)
    models = [rw.replicate(nn.Linear(WIDTH, WIDTH).double().to(world.device)) for _ in range(2)]
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.01)
    x = torch.full((2, WIDTH), world.rank + 1.0, dtype=torch.float64).to(world.device)
    for _ in range(3):
        order = models if world.rank else models[::-1]
        first, second = (model(x).square().mean() for model in order)
        (first + second).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {f"{n} {key}": value.cpu() for n, model in enumerate(models) for key, value in model.state_dict().items()}


def test_two_models_in_one_backward() -> None:
    expected = run_ranks(_two_models, 2, exchange="gloo")[0].get()
    for parameters in on_standin(_two_models, 2, backend="strict"):
        assert largest_difference(parameters, expected) < TOLERANCE


class Moved(nn.Module):
    """A layer that is called behind BatchNorm in the first step, and before it later."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor, *, is_first: bool) -> torch.Tensor:
        return self.layer(self.norm(x)) if is_first else self.norm(self.layer(x))


def _late(world: World) -> str:
    _one_bucket_per_layer()
    model = rw.replicate(Moved().to(world.device), sync_batchnorm=True)
    x = (torch.arange(4.0 * WIDTH).view(4, WIDTH).sin() + world.rank).to(world.device).requires_grad_()
    model(x, is_first=True).square().mean().backward()
    with pytest.raises(ConfigurationError) as caught:
        model(x, is_first=False).square().mean().backward()
    return str(caught.value)


def test_a_gradient_that_arrives_after_its_turn_is_an_error() -> None:
    for text in on_standin(_late, 2, backend="strict"):
        assert "layer.weight received another gradient" in text or "layer.bias received another gradient" in text
        assert "later than in the first step" in text
