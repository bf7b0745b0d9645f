# SPDX-License-Identifier: Apache-2.0
"""Loops as strangers write them around the step of a pipeline: each ends where the same loop on one device does."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from replicas import TOLERANCE, Parameters, largest_difference
from torch import nn
from torch.nn import functional

import rankwise as rw
from rankwise import testing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rankwise.world.facts import World

    Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

NUM, BATCH, EPOCHS = 19, 6, 3
"""The last batch has one sample: fewer than micro-batches."""
CLASS_WEIGHTS = torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64)


class Run:
    """What a loop uses, on one device or in stages."""

    def __init__(self, *, in_stages: bool) -> None:
        torch.manual_seed(0)
        layers = [m for _ in range(4) for m in (nn.Linear(4, 4), nn.Tanh())]
        self.model = nn.Sequential(*layers, nn.Linear(4, 3)).double()
        self._in_stages = in_stages
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(NUM, 4, generator=generator, dtype=torch.float64)
        self.y = torch.randint(3, (NUM,), generator=generator)
        self._staged: Any = None

    def step(self, loss_fn: Loss) -> Step:
        """Return the step of a model."""
        if self._in_stages:
            self._staged = rw.pipeline(self.model, loss_fn, example=self.x[:BATCH], micro_batches=3)
            return self._staged  # type: ignore[no-any-return]

        def plain(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = loss_fn(self.model(x), y)
            loss.backward()
            return loss.detach()

        return plain

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the model."""
        if self._staged is not None:
            return self._staged.predict(x)  # type: ignore[no-any-return]
        with torch.no_grad():
            return self.model(x)  # type: ignore[no-any-return]

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Return the batches of an epoch."""
        if self._in_stages:
            yield from rw.DataLoader((self.x, self.y), global_batch_size=BATCH)
        else:
            yield from zip(self.x.split(BATCH), self.y.split(BATCH), strict=True)


def _fit(run: Run, loss_fn: Loss, **hooks: Callable[..., None]) -> list[float]:
    """Train by SGD with momentum; hooks get the optimizer, that of an epoch the mean of its losses too."""
    step = run.step(loss_fn)
    optimizer = torch.optim.SGD(run.model.parameters(), lr=0.05, momentum=0.9)
    if "begin" in hooks:
        hooks["begin"](optimizer)
    seen = []
    for _ in range(EPOCHS):
        losses = []
        for x, y in run.batches():
            losses.append(float(step(x, y)))
            if "before_step" in hooks:
                hooks["before_step"](optimizer)
            optimizer.step()
            optimizer.zero_grad()
            if "after_step" in hooks:
                hooks["after_step"](optimizer)
        seen += losses
        if "after_epoch" in hooks:
            hooks["after_epoch"](optimizer, sum(losses) / len(losses))
    return seen


def _summed(run: Run) -> list[float]:
    return _fit(run, lambda o, y: functional.cross_entropy(o, y, reduction="sum"))


def _class_weights(run: Run) -> list[float]:
    return _fit(run, lambda o, y: functional.cross_entropy(o, y, weight=CLASS_WEIGHTS, label_smoothing=0.1))


def _ignored(run: Run) -> list[float]:
    return _fit(run, lambda o, y: functional.cross_entropy(o, y, ignore_index=1))


def _scheduler(run: Run) -> list[float]:
    schedulers: list[Any] = []
    return _fit(
        run,
        functional.cross_entropy,
        begin=lambda optimizer: schedulers.append(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)),
        after_step=lambda _: schedulers[0].step(),
    )


def _plateau(run: Run) -> list[float]:
    schedulers: list[Any] = []

    def begin(optimizer: torch.optim.Optimizer) -> None:
        schedulers.append(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=0, threshold=0.9))

    def after_epoch(_: torch.optim.Optimizer, __: float) -> None:
        schedulers[0].step(float(functional.cross_entropy(run.predict(run.x), run.y)))

    return _fit(run, functional.cross_entropy, begin=begin, after_epoch=after_epoch)


def _accumulated(run: Run) -> list[float]:
    step = run.step(lambda o, y: functional.cross_entropy(o, y) / 2)
    optimizer = torch.optim.Adam(run.model.parameters(), lr=0.01)
    seen = []
    for _ in range(EPOCHS):
        for number, (x, y) in enumerate(run.batches()):
            seen.append(float(step(x, y)))
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
    return seen


def _scaled(run: Run) -> list[float]:
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0, growth_interval=3)
    step = run.step(lambda o, y: scaler.scale(functional.cross_entropy(o, y)))
    optimizer = torch.optim.SGD(run.model.parameters(), lr=0.05)
    seen = []
    for _ in range(EPOCHS):
        for x, y in run.batches():
            seen.append(float(step(x, y)))
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(run.model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            seen.append(scaler.get_scale())
    return seen


def _averaged(run: Run) -> list[float]:
    averages: dict[str, torch.Tensor] = {}

    def after_step(_: object) -> None:
        for name, one in run.model.named_parameters():
            if not one.is_meta:
                old = averages.get(name, one.detach())
                averages[name] = 0.9 * old + 0.1 * one.detach()

    seen = _fit(run, functional.cross_entropy, after_step=after_step)
    with torch.no_grad():
        for name, one in run.model.named_parameters():
            if not one.is_meta:
                one.copy_(averages[name])
    return seen


def _swa(run: Run) -> list[float]:
    models: list[Any] = []

    def after_step(_: object) -> None:
        models[:] = models or [torch.optim.swa_utils.AveragedModel(run.model)]
        models[0].update_parameters(run.model)

    seen = _fit(run, functional.cross_entropy, after_step=after_step)
    run.model.load_state_dict(copy.deepcopy(models[0].module.state_dict()))
    return seen


def _frozen(run: Run) -> list[float]:
    for parameter in run.model[0].parameters():  # type: ignore[index]
        parameter.requires_grad_(False)
    seen = _fit(run, functional.cross_entropy)
    for name, parameter in run.model.named_parameters():
        if name.startswith("4."):
            parameter.requires_grad_(False)
    return seen + _more(run)


def _more(run: Run) -> list[float]:
    """Train on with the step that there is, after layers were frozen."""
    seen = []
    optimizer = torch.optim.SGD([one for one in run.model.parameters() if one.requires_grad], lr=0.05)
    step = run._staged or run.step(functional.cross_entropy)
    for x, y in run.batches():
        seen.append(float(step(x, y)))
        optimizer.step()
        optimizer.zero_grad()
    return seen


def _evaluated(run: Run) -> list[float]:
    seen: list[float] = []

    def after_epoch(_: object, mean: float) -> None:
        run.model.eval()
        correct = (run.predict(run.x).argmax(1) == run.y).double().mean()
        run.model.train()
        seen.extend((float(correct), mean))

    return _fit(run, functional.cross_entropy, after_epoch=after_epoch) + seen


def _stops(run: Run) -> list[float]:
    best = [float("inf")]
    seen = []
    step = run.step(functional.cross_entropy)
    optimizer = torch.optim.SGD(run.model.parameters(), lr=0.4)
    for _ in range(9):
        for x, y in run.batches():
            loss = step(x, y)
            seen.append(float(loss))
            if loss > 1.3 * best[0]:
                return seen
            best[0] = min(best[0], float(loss))
            optimizer.step()
            optimizer.zero_grad()
    return seen


def _penalised(run: Run) -> list[float]:
    def before_step(_: object) -> None:
        for one in run.model.parameters():
            if one.grad is not None:
                one.grad.add_(one.detach().sign(), alpha=1e-3)

    return _fit(run, functional.cross_entropy, before_step=before_step)


def _two_terms(run: Run) -> list[float]:
    return _fit(run, lambda o, y: functional.cross_entropy(o, y) + 0.01 * o.square().mean())


LOOPS: dict[str, Callable[[Run], list[float]]] = {
    "summed": _summed,
    "class weights": _class_weights,
    "ignored labels": _ignored,
    "scheduler": _scheduler,
    "plateau": _plateau,
    "accumulated": _accumulated,
    "scaled and clipped": _scaled,
    "average of weights": _averaged,
    "AveragedModel": _swa,
    "frozen": _frozen,
    "evaluated": _evaluated,
    "stops by its loss": _stops,
    "penalised": _penalised,
    "two terms": _two_terms,
}


def _looped(name: str, *, in_stages: bool) -> tuple[list[float], Parameters]:
    run = Run(in_stages=in_stages)
    seen = LOOPS[name](run)
    return seen, {key: one.detach().clone() for key, one in run.model.state_dict().items() if not one.is_meta}


def _on_ranks(_: World) -> dict[str, tuple[list[float], Parameters]]:
    rw.mesh(pp=-1)
    return {name: _looped(name, in_stages=True) for name in LOOPS}


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_loops_end_where_one_device_ends(num_ranks: int) -> None:
    plain = {name: _looped(name, in_stages=False) for name in LOOPS}
    for result in testing.run_ranks(_on_ranks, num_ranks):
        for name, (seen, found) in result.get().items():
            expected, weights = plain[name]
            assert seen == pytest.approx(expected, rel=1e-9), name
            assert largest_difference(found, {key: weights[key] for key in found}) < TOLERANCE, name
