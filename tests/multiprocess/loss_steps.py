# SPDX-License-Identifier: Apache-2.0
"""Training steps of the tests of loss weights: a small model, batches of unequal size, and loops of scripts."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from losses import CLASS_WEIGHTS, labels
from replicas import part
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from losses import Loss
    from replicas import Parameters

    Step = Callable[[nn.Module, torch.Tensor, torch.Tensor], None]
    """Computes a loss of inputs [batch, 3] and targets [batch, 4], and calls backward."""

SIZES = (9, 4, 2, 7)
"""Of the global batches: the third leaves ranks without samples."""


def plain_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).double()


def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(size, 3, generator=generator, dtype=torch.float64),
            torch.randn(size, 4, generator=generator, dtype=torch.float64),
        )
        for size in SIZES
    ]


def train(model: nn.Module, step: Step, rank: int, of: int) -> Parameters:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for x, y in data():
        optimizer.zero_grad()
        step(model, part(x, rank, of), part(y, rank, of))
        optimizer.step()
    return whole(model.state_dict())


def whole(tensors: dict[str, torch.Tensor]) -> Parameters:
    """Return copies of tensors, each gathered from all ranks where it is spread over them."""
    found = {key: one.full_tensor() if isinstance(one, DTensor) else one for key, one in tensors.items()}
    return {key: one.detach().clone() for key, one in found.items()}


def gradients(model: nn.Module) -> Parameters:
    return whole({name: one.grad for name, one in model.named_parameters() if one.grad is not None})


def step_of(loss: Loss) -> Step:
    return lambda model, x, y: loss(model(x), y, x).backward()


def two_steps_of(loss: Loss) -> Step:
    def step(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
        loss(model(x), y, x).backward()
        (loss(model(x), y, x) / 7).backward()

    return step


def _weight_decay(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    penalty = sum(parameter.pow(2).sum() for parameter in model.parameters())
    (functional.mse_loss(model(x), y) + 0.1 * penalty).backward()


def _weight_decay_and_sum(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    penalty = sum(parameter.abs().sum() for parameter in model.parameters())
    (functional.mse_loss(model(x), y, reduction="sum") + 0.1 * penalty).backward()


def _penalties(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    weights = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    norms = sum(one.norm() for one in weights)
    unlike_orthogonal = sum((one.T @ one - torch.eye(one.shape[1])).pow(2).sum() for one in weights)
    (functional.mse_loss(model(x), y, reduction="sum") + norms + 0.1 * unlike_orthogonal).backward()


def _gradient_penalty(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    x = x.clone().requires_grad_()
    output = model(x)
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    (functional.mse_loss(output, y) + 10 * ((slope.norm(dim=1) - 1) ** 2).mean()).backward()


def _scaled(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(functional.cross_entropy(model(x), labels(y), weight=CLASS_WEIGHTS)).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(1024.0)


def _two_roots(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    output = model(x)
    roots = [
        functional.mse_loss(output, y, reduction="sum"),
        functional.cross_entropy(output, labels(y), weight=CLASS_WEIGHTS),
    ]
    torch.autograd.backward(roots)


def _some_inputs(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    inputs = [parameter for name, parameter in model.named_parameters() if "weight" in name]
    functional.mse_loss(model(x), y, reduction="sum").backward(inputs=inputs)


def _same_graph_twice(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    loss = functional.mse_loss(model(x), y, reduction="sum") + functional.l1_loss(model(x), y)
    loss.backward(retain_graph=True)
    loss.backward()


def _checkpointed(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    output = model(x)
    loss = checkpoint(lambda o: functional.mse_loss(o, y, reduction="sum"), output, use_reentrant=False)
    assert isinstance(loss, torch.Tensor)
    loss.backward()


def _sequence_first(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    steps = torch.stack([x, x * 2, x.cos(), x + 1, x.sin()])
    ((model(steps) - y) ** 2).mean().backward()


def _tokens(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    lengths = (y[:, 1].abs() * 3).long().tolist()
    outputs = model(x)
    tokens = torch.cat([outputs[i].expand(n, 4) for i, n in enumerate(lengths)]) if lengths else outputs
    classes = torch.cat([labels(y)[i].expand(n) for i, n in enumerate(lengths)]) if lengths else labels(y)
    functional.cross_entropy(tokens, classes).backward()


class LossInside(nn.Module):
    """Computes its loss itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = plain_model()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        output = self.inner(x)
        return {"loss": functional.cross_entropy(output, labels(y), weight=CLASS_WEIGHTS), "output": output}

    def training_step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(self.inner(x), y, reduction="sum")


class LossAlone(nn.Module):
    """Returns nothing but its loss, which lies behind statistics over all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = plain_model()
        self.norm = nn.BatchNorm1d(4).double()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.norm(self.inner(x)), labels(y), weight=CLASS_WEIGHTS)


STEPS: dict[str, Step] = {
    "weight_decay": _weight_decay,
    "weight_decay_and_sum": _weight_decay_and_sum,
    "penalties": _penalties,
    "gradient_penalty": _gradient_penalty,
    "scaled": _scaled,
    "two_roots": _two_roots,
    "some_inputs": _some_inputs,
    "same_graph_twice": _same_graph_twice,
    "checkpointed": _checkpointed,
    "sequence_first": _sequence_first,
    "tokens": _tokens,
}


@contextmanager
def said() -> Generator[list[str]]:
    """Give what rankwise's log says on this rank inside the block."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("rankwise")
    log.addHandler(handler)
    try:
        yield lines
    finally:
        log.removeHandler(handler)
