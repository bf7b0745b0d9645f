# SPDX-License-Identifier: Apache-2.0
"""Training loops as public scripts write them: each takes what replicates a model, and what gives the batches.

Alone they are plain scripts; on ranks three lines differ, as the README teaches.
"""

from __future__ import annotations

import copy
import itertools
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from torch.optim import swa_utils
from torch.utils.data import TensorDataset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from replicas import Parameters

    Batches = Iterable[Sequence[torch.Tensor]]
    Mean = Callable[[torch.Tensor, int], float]
    """Of a loss and a number of samples, over all ranks."""
    Loop = Callable[[Callable[[nn.Module], nn.Module], Batches, Mean], nn.Module]
    """Trains for two epochs, and returns the model."""

NUM_SAMPLES = 23
BATCH_SIZE = 6
"""The last batch has 5 samples: 2, 2 and 1 on three ranks."""


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(NUM_SAMPLES, 3, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randn(NUM_SAMPLES, 2, generator=generator, dtype=torch.float64))


def plain_batches() -> Batches:
    return torch.utils.data.DataLoader(dataset(), batch_size=BATCH_SIZE)


def plain_mean(loss: torch.Tensor, size: int) -> float:
    del size
    return loss.item()


def parameters_of(model: nn.Module) -> Parameters:
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


def network(*layers: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), *layers, nn.Linear(5, 2)).double()


def clipping(replicate: Callable[[nn.Module], nn.Module], batches: Batches, _: Mean) -> nn.Module:
    model = replicate(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, weight_decay=1e-3)
    for _epoch in range(2):
        for x, y in batches:
            optimizer.zero_grad()
            functional.mse_loss(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
    return model


def moving_average(replicate: Callable[[nn.Module], nn.Module], batches: Batches, _: Mean) -> nn.Module:
    model = replicate(network())
    average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _epoch in range(2):
        for x, y in batches:
            optimizer.zero_grad()
            functional.mse_loss(model(x), y).backward()
            optimizer.step()
            average.update_parameters(model)
    return average


def schedule(replicate: Callable[[nn.Module], nn.Module], batches: Batches, _: Mean) -> nn.Module:
    model = replicate(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
    for _epoch in range(2):
        for x, y in batches:
            optimizer.zero_grad()
            functional.mse_loss(model(x), y).backward()
            optimizer.step()
            scheduler.step()
    return model


def plateau(replicate: Callable[[nn.Module], nn.Module], batches: Batches, mean: Mean) -> nn.Module:
    model = replicate(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.5)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.3)
    for _epoch in range(4):
        for x, y in batches:
            optimizer.zero_grad()
            loss = functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step(mean(loss, len(x)))
    return model


def early_stopping(replicate: Callable[[nn.Module], nn.Module], batches: Batches, mean: Mean) -> nn.Module:
    model = replicate(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    best = float("inf")
    for _epoch in range(6):
        latest = best
        for x, y in batches:
            optimizer.zero_grad()
            loss = functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            latest = mean(loss, len(x))
        if latest > 0.999 * best:
            break
        best = latest
    return model


def line_search(replicate: Callable[[nn.Module], nn.Module], batches: Batches, mean: Mean) -> nn.Module:
    model = replicate(network())
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
    for x, y in batches:

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> float:
            optimizer.zero_grad()
            loss = functional.mse_loss(model(x), y)
            loss.backward()
            return mean(loss, len(x))

        optimizer.step(closure)
    return model


def target_network(replicate: Callable[[nn.Module], nn.Module], batches: Batches, _: Mean) -> nn.Module:
    model = replicate(network())
    target = copy.deepcopy(model)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.02)
    for number, (x, y) in enumerate(batches):
        if number % 2 == 0:
            target.load_state_dict(model.state_dict())
        with torch.no_grad():
            goal = y[:, 0] + 0.9 * target(x).max(1).values
        optimizer.zero_grad()
        functional.smooth_l1_loss(model(x).gather(1, (y[:, 1:] > 0).long()).squeeze(1), goal).backward()
        optimizer.step()
    return model


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.recurrent = nn.LSTM(1, 4, batch_first=True).double()
        self.last = nn.Linear(4, 2).double()

    def forward(
        self, x: torch.Tensor, state: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        output, after = self.recurrent(x, state)
        return self.last(output[:, -1]), after


def truncated_backpropagation(replicate: Callable[[nn.Module], nn.Module], batches: Batches, _: Mean) -> nn.Module:
    model = replicate(_Recurrent())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for x, y in batches:
        state = None
        for chunk in x[:, :, None].split(2, dim=1):
            if state is not None:
                state = tuple(part.detach() for part in state)
            optimizer.zero_grad()
            output, state = model(chunk, state)
            functional.mse_loss(output, y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    return model


def carried_state(replicate: Callable[[nn.Module], nn.Module], batches: Batches, _: Mean) -> nn.Module:
    model = replicate(_Recurrent())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = None
    for x, y in itertools.islice(batches, NUM_SAMPLES // BATCH_SIZE):  # those of one size
        optimizer.zero_grad()
        output, state = model(x[:, :, None], state)
        functional.mse_loss(output, y).backward()
        optimizer.step()
        state = tuple(part.detach() for part in state)
    return model


def encoder_and_decoder(replicate: Callable[[nn.Module], nn.Module], batches: Batches, _: Mean) -> nn.Module:
    encoder, decoder = replicate(network()), replicate(nn.Linear(2, 3).double())
    decoder.load_state_dict({"weight": torch.eye(3, 2).double(), "bias": torch.zeros(3).double()})
    optimizers = [torch.optim.Adam(one.parameters(), lr=0.05) for one in (encoder, decoder)]
    for _epoch in range(2):
        for x, _target in batches:
            for optimizer in optimizers:
                optimizer.zero_grad()
            functional.mse_loss(decoder(encoder(x)), x).backward()
            for optimizer in optimizers:
                optimizer.step()
    return nn.ModuleList([encoder, decoder])


def fine_tuning(replicate: Callable[[nn.Module], nn.Module], batches: Batches, _: Mean) -> nn.Module:
    model = network()
    first, _, last = model.children()
    first.requires_grad_(False)
    replicate(model)
    optimizer = torch.optim.Adam(
        [{"params": first.parameters(), "lr": 0.001}, {"params": last.parameters(), "lr": 0.05}]
    )
    for epoch in range(2):
        first.requires_grad_(epoch > 0)
        for x, y in batches:
            optimizer.zero_grad()
            functional.mse_loss(model(x), y).backward()
            optimizer.step()
    return model


def by_hand(replicate: Callable[[nn.Module], nn.Module], batches: Batches, _: Mean) -> nn.Module:
    """Without an optimizer, as tutorials have it."""
    model = replicate(network())
    for x, y in batches:
        model.zero_grad()
        functional.mse_loss(model(x), y).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(0.1 * parameter.grad)
    return model


def mixed_precision(replicate: Callable[[nn.Module], nn.Module], batches: Batches, _: Mean) -> nn.Module:
    model = replicate(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    for x, y in batches:
        optimizer.zero_grad()
        scaler.scale(functional.mse_loss(model(x), y)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        scaler.step(optimizer)
        scaler.update()
    return model


def sharpness_aware(replicate: Callable[[nn.Module], nn.Module], batches: Batches, _: Mean) -> nn.Module:
    model = replicate(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches:
        optimizer.zero_grad()
        functional.mse_loss(model(x), y).backward()
        norm = nn.utils.get_total_norm([one.grad for one in model.parameters() if one.grad is not None])
        kept = [one.detach().clone() for one in model.parameters()]
        with torch.no_grad():
            for one in model.parameters():
                assert one.grad is not None
                one.add_(0.05 * one.grad / norm)
        optimizer.zero_grad()
        functional.mse_loss(model(x), y).backward()
        with torch.no_grad():
            for one, before in zip(model.parameters(), kept, strict=True):
                one.copy_(before)
        optimizer.step()
    return model


def clipped_per_sample(replicate: Callable[[nn.Module], nn.Module], batches: Batches, _: Mean) -> nn.Module:
    model = replicate(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_of_one(parameters: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(functional_call(model, parameters, (x[None],)), y[None])

    for x, y in batches:
        parameters = {name: one.detach() for name, one in model.named_parameters()}
        gradients = vmap(grad(loss_of_one), (None, 0, 0))(parameters, x, y)
        norms = torch.stack([one.flatten(1).norm(dim=1) for one in gradients.values()]).norm(dim=0)
        optimizer.zero_grad()
        ((model(x) - y).square().mean(1) * (0.3 / norms).clamp(max=1)).mean().backward()
        optimizer.step()
    return model


def validation(replicate: Callable[[nn.Module], nn.Module], batches: Batches, _: Mean) -> nn.Module:
    model = replicate(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    best, kept = float("inf"), copy.deepcopy(model.state_dict())
    for _epoch in range(3):
        model.train()
        for x, y in batches:
            optimizer.zero_grad()
            functional.mse_loss(model(x), y).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            x, y = dataset().tensors
            loss = functional.mse_loss(model(x), y).item()
        if loss < best:
            best, kept = loss, copy.deepcopy(model.state_dict())
    model.load_state_dict(kept)
    return model


LOOPS: dict[str, Loop] = {
    loop.__name__: loop
    for loop in (
        clipping,
        moving_average,
        schedule,
        plateau,
        early_stopping,
        line_search,
        target_network,
        truncated_backpropagation,
        carried_state,
        encoder_and_decoder,
        fine_tuning,
        by_hand,
        mixed_precision,
        sharpness_aware,
        clipped_per_sample,
        validation,
    )
}
