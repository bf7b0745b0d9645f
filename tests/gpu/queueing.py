# SPDX-License-Identifier: Apache-2.0
"""Parts about what a step makes the host wait for: nothing, so that a whole step fits into a CUDA graph."""

from __future__ import annotations

import re
import time
import warnings
from collections import Counter
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from setting import Check, NotPossible, compared
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rankwise as rw
from rankwise.health.queued_collectives import QUEUED_LONG_SECONDS
from rankwise.world.device.choice import goes_through_host

if TYPE_CHECKING:
    from collections.abc import Callable

    from setting import Setting

    from rankwise.world.facts import World

WARM_UP, COUNTED = 4, 5
WAITS = re.compile("synchronizing CUDA operation|CPU waits for the stand-in")
LOSS_TOLERANCE = 1e-12


def _model(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 8)).to(device)


def _step(device: str, way: str) -> Callable[[], None]:
    """Return a step of training: ``replicate``, ``accumulation`` or ``clipping``, or the last one by DDP."""
    model = _model(device)
    model = DistributedDataParallel(model) if way == "DDP" else rw.replicate(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = torch.randn(16, 32, device=device), torch.randn(16, 8, device=device)

    def step() -> None:
        for index in range(2 if way == "accumulation" else 1):
            with rw.no_sync(model) if way == "accumulation" and not index else nullcontext():
                nn.functional.mse_loss(model(x), y).backward()
        if way in {"clipping", "DDP"}:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _count(world: World, way: str) -> tuple[int, str]:
    """Return how often the host waited for the device in some steady steps, and where."""
    if goes_through_host(world.device, world.backend):
        raise NotPossible("tensors go through host memory")
    step = _step(world.device, way)
    for _ in range(WARM_UP):
        step()
    module = torch.get_device_module(world.device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module.set_sync_debug_mode("warn")
        for _ in range(COUNTED):
            step()
        module.set_sync_debug_mode("default")
    places = Counter(f"{Path(one.filename).name}:{one.lineno}" for one in caught if WAITS.search(str(one.message)))
    return places.total(), ", ".join(f"{count}x {place}" for place, count in places.most_common(5))


def _syncs(way: str, setting: Setting) -> str:
    if setting.kind == "cpu":
        setting.needs_cuda()
    number, places = setting.alone(_count, way)
    assert not number or way == "DDP", f"{number / COUNTED:g} per step: {places}"
    return f"{number / COUNTED:g} per step"


def _graph(world: World) -> float:
    """Capture a step after three eager ones; return how far five replays are from eager steps."""
    from torch.cuda import CUDAGraph, Stream, current_stream, graph, stream

    torch.manual_seed(1)
    x = torch.randn(8, 16, 32, dtype=torch.float64, device=world.device)
    y = torch.randn(8, 16, 8, dtype=torch.float64, device=world.device)
    found: list[torch.Tensor] = []
    for captures in (False, True):
        model = rw.replicate(_model(world.device).double())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, capturable=True)
        x_now, y_now = x[0].clone(), y[0].clone()

        def step(
            model: nn.Module = model,
            optimizer: torch.optim.Optimizer = optimizer,
            x_now: torch.Tensor = x_now,
            y_now: torch.Tensor = y_now,
        ) -> None:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x_now), y_now).backward()
            optimizer.step()

        beside = Stream()
        beside.wait_stream(current_stream())
        with stream(beside):
            for _ in range(3):
                step()
        current_stream().wait_stream(beside)
        run: Callable[[], object] = step
        if captures:
            captured = CUDAGraph()
            with graph(captured):
                step()
                # Longer than the thread leaves collectives to the training thread: it asks about them meanwhile.
                time.sleep(1.5 * QUEUED_LONG_SECONDS)
            run = captured.replay
        for index in range(3, 8):
            x_now.copy_(x[index])
            y_now.copy_(y[index])
            run()
        found.append(nn.utils.parameters_to_vector(model.parameters()).detach().cpu())
    return (found[0] - found[1]).abs().max().item()


def _captured(over_group: bool, setting: Setting) -> str:
    setting.needs_cuda()
    difference = setting.alone(_graph) if over_group else setting.shared(_graph, 1)[0]
    return f"replay differs from eager by {compared(difference, LOSS_TOLERANCE)}"


SYNCS = [
    Check(f"host synchronisations, {way}", partial(_syncs, way))
    for way in ("DDP", "replicate", "accumulation", "clipping")
]
GRAPH = [
    Check("CUDA graph of a step, 1 rank", partial(_captured, False)),
    Check("CUDA graph of a step with NCCL, 1 rank", partial(_captured, True)),
]
