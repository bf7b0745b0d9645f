# SPDX-License-Identifier: Apache-2.0
"""Models, optimizers, options and errors, as ``make.py`` pickled them."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from kept_models import FEATURES, NUM_SAMPLES, WIDTH, Tensors, adam, numbers, tensors_of
from torch import nn

import rankwise as rw
import rankwise.compat.horovod as hvd
from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.world.facts import World


def _small(*, horovod: bool = False) -> nn.Sequential:
    norm = hvd.SyncBatchNorm(WIDTH) if horovod else nn.BatchNorm1d(WIDTH)
    model = nn.Sequential(nn.Linear(FEATURES, WIDTH), norm, nn.Tanh(), nn.Linear(WIDTH, 2)).double()
    with torch.no_grad():
        for number, tensor in enumerate(model.parameters()):
            tensor.copy_(numbers(*tensor.shape, start=number))
    return model


def _ways(which: str, folder: str) -> dict[str, Callable[[], nn.Module]]:
    """Return functions that build the models to pickle, in one kind of world."""
    return {
        "one": {
            "place": lambda: rw.place(_small(), {"": "cpu", "3": "disk"}, offload_folder=folder),
        },
        "replicas": {
            "replicate": lambda: rw.replicate(_small()),
            "sync_batchnorm": lambda: rw.replicate(_small(), sync_batchnorm=True),
            "compress": lambda: rw.replicate(_small(), compress="powersgd"),
            "horovod": lambda: rw.independent(_small(horovod=True)),
        },
        "islands": {"local_sgd": lambda: _with_rounds(_small())},
    }[which]


def _with_rounds(model: nn.Module) -> nn.Module:
    rw.local_sgd(model, every=1)
    return model


def write_pickles(world: World, which: str, folder: str) -> dict[str, Tensors]:
    """Pickle models, copies of them, optimizers and schedulers; return their state."""
    hvd.init()
    held: dict[str, Tensors] = {}
    for name, make in _ways(which, folder).items():
        model = make()
        optimizer = adam(model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for _ in range(2):
            model(numbers(NUM_SAMPLES, FEATURES, start=world.rank)).square().mean().backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        written = {"model": model, "copy": copy.deepcopy(model), "optimizer": optimizer, "scheduler": scheduler}
        for kind, thing in written.items():
            if world.rank == 0:
                torch.save(thing, f"{folder}/{name}-{kind}.pt")
        held[name] = tensors_of({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        held[name]["output"] = model.eval()(numbers(NUM_SAMPLES, FEATURES, start=5)).detach()
    return held


def values_by_class() -> dict[str, Any]:
    """Return options of calls, and errors, which a user may pickle with a training's arguments."""
    return {
        "DiLoCo": rw.DiLoCo(lr=0.5, momentum=0.8),
        "TopK": rw.TopK(0.25),
        "PowerSGD": rw.PowerSGD(3),
        "hvd.Average": hvd.Average,
        "hvd.Compression.fp16": hvd.Compression.fp16,
        "ConfigurationError": ConfigurationError("It is bad.", where="rank 1", evidence="seen", do="change it"),
        "hvd.HorovodInternalError": hvd.HorovodInternalError("It failed."),
    }
