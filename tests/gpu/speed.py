# SPDX-License-Identifier: Apache-2.0
"""The part that measures a step of ``replicate`` against plain PyTorch and DDP, by turns in one process."""

from __future__ import annotations

import random
import time
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from setting import Check, NotPossible, synchronize
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rankwise as rw
from rankwise.world.device.choice import goes_through_host

if TYPE_CHECKING:
    from collections.abc import Callable

    from setting import Setting

    from rankwise.world.facts import World

REACH = 1.01
"""A step may take this many times what it takes with DDP, and this many times the memory."""
ROUNDS, STEPS, WARM_UP = 15, 4, 5
SECONDS = 100.0

Made = tuple[nn.Module, "Callable[[nn.Module], torch.Tensor]"]


def _resnet(device: str, *, is_small: bool) -> Made:
    try:
        from torchvision.models import resnet50
    except ImportError:
        if not is_small:
            raise NotPossible("torchvision is not installed") from None
        model: nn.Module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.LazyLinear(10))
        model(torch.zeros(2, 3, 8, 8))
        size, batch = 8, 4
    else:
        model, size, batch = resnet50(), 224 if not is_small else 32, 128 if not is_small else 2
    model = model.to(device).to(memory_format=torch.channels_last)
    x = torch.randn(batch, 3, size, size, device=device).to(memory_format=torch.channels_last)
    y = torch.randint(10, (batch,), device=device)

    def loss(model: nn.Module) -> torch.Tensor:
        with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
            return nn.functional.cross_entropy(model(x).float(), y)

    return model, loss


def _gpt(device: str, *, dropout: float, is_small: bool) -> Made:
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError:
        raise NotPossible("transformers is not installed") from None
    small = {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 101, "n_positions": 16} if is_small else {}
    config = GPT2Config(resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, use_cache=False, **small)
    model = GPT2LMHeadModel(config).to(torch.bfloat16).to(device)
    # On a device of torch's PrivateUse1, to() makes new parameters, one for each name.
    model.tie_weights()
    tokens = torch.randint(config.vocab_size, (2, 16) if is_small else (8, 1024), device=device)
    return model, lambda model: model(input_ids=tokens, labels=tokens).loss


MODELS: dict[str, Callable[..., Made]] = {
    "ResNet-50, batch 128, channels_last, bf16 autocast": _resnet,
    "GPT 124 M in bfloat16, 8 x 1024 tokens": partial(_gpt, dropout=0.1),
    "GPT 124 M in bfloat16 without dropout": partial(_gpt, dropout=0.0),
}


def _step(side: str, make: Callable[..., Made], device: str, *, is_small: bool) -> Callable[[], None]:
    torch.manual_seed(0)
    model, loss_of = make(device, is_small=is_small)
    wrapped = DistributedDataParallel(model) if side == "DDP" else model
    if side == "rankwise":
        rw.replicate(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        loss_of(wrapped).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _seconds(step: Callable[[], None]) -> float:
    synchronize()
    began = time.perf_counter()
    for _ in range(STEPS):
        step()
    synchronize()
    return (time.perf_counter() - began) / STEPS


def _measure(world: World, name: str, is_small: bool) -> dict[str, tuple[list[float], int]]:
    """Return of each side seconds per step, one number per round, and the most memory that it has held alone."""
    has_ddp = not goes_through_host(world.device, world.backend)
    sides = ["plain", *["DDP"] * has_ddp, "rankwise"]
    memory: dict[str, int] = {}
    for side in sides:
        step = _step(side, MODELS[name], world.device, is_small=is_small)
        step()
        if not is_small:
            torch.cuda.reset_peak_memory_stats()
        step()
        step()
        memory[side] = 0 if is_small else torch.cuda.max_memory_allocated()
        del step
        _release(is_small)
    steps = {side: _step(side, MODELS[name], world.device, is_small=is_small) for side in sides}
    for step in steps.values():
        for _ in range(1 if is_small else WARM_UP):
            step()
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    draw = random.Random(0)
    for _ in range(2 if is_small else ROUNDS):
        for side in draw.sample(sides, len(sides)):
            seconds[side].append(_seconds(steps[side]))
    return {side: (seconds[side], memory[side]) for side in sides}


def _release(is_small: bool) -> None:
    import gc

    gc.collect()
    if not is_small:
        torch.cuda.empty_cache()


def _ratio(found: dict[str, Any], against: str) -> float:
    return median(own / other for own, other in zip(found["rankwise"][0], found[against][0], strict=True))


def _speed(name: str, setting: Setting) -> str:
    found = setting.alone(_measure, name, not setting.is_cuda, seconds=SECONDS)
    if not setting.is_cuda:
        return f"ran with {', '.join(found)} on a small model"
    words = [
        f"{side} {1000 * median(seconds):.1f} ms, {memory / 2**30:.2f} GiB" for side, (seconds, memory) in found.items()
    ]
    ratio, share = _ratio(found, "DDP"), found["rankwise"][1] / found["DDP"][1]
    words.append(f"time {ratio:.3f} of DDP, {_ratio(found, 'plain'):.3f} of plain; memory {share:.3f} of DDP")
    figures = "; ".join(words)
    assert ratio <= REACH, f"slower than DDP: {figures}"
    assert share <= REACH, f"more memory than DDP: {figures}"
    return figures


SPEED = [Check(name, partial(_speed, name)) for name in MODELS]
