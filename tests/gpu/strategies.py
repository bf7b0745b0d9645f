# SPDX-License-Identifier: Apache-2.0
"""The part with every strategy that fits on one device, mixed precision, torch.compile, loaders and checkpoints."""

from __future__ import annotations

import tempfile
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from promise import parameters_of
from replicas import TOLERANCE, Parameters, batches, built, largest_difference
from setting import Check, NotPossible, compared
from spread_training import train
from torch import nn
from torch.utils.data import TensorDataset

import rankwise as rw
from rankwise.errors import ConfigurationError, TorchTooOld
from rankwise.testing import run_ranks

if TYPE_CHECKING:
    from setting import Setting

    from rankwise.world.facts import World

WAYS: list[tuple[str, dict[str, int]]] = [
    ("replicate", {}),
    ("shard", {}),
    ("pipeline", {}),
    ("placed", {}),
    ("shard", {"dp_shard": 2}),
    ("replicate", {"tp": 2}),
    ("pipeline", {"pp": 2}),
    ("placed", {"dp_replicate": 2}),
]
AMP_TOLERANCE = 1e-6
NUM_SAMPLES = 37
EPOCHS, SAVES_AFTER = 2, 4


def _is_refusal(error: BaseException | None) -> bool:
    no_backend = isinstance(error, ConfigurationError) and "needs a torch backend that supports" in str(error)
    return no_backend or isinstance(error, TorchTooOld)


def _spread(strategy: str, sizes: dict[str, int], setting: Setting) -> str:
    num_ranks = torch.Size(sizes.values()).numel()
    folder = tempfile.mkdtemp()
    options: dict[str, Any] = {"device": setting.device}
    if num_ranks > 1:
        options = setting.any_backend(num_ranks)
    expected = setting.on_cpu(train, "replicate", {}, folder)
    differences: list[float] = []
    for result in run_ranks(train, num_ranks, strategy, sizes, folder, **options):
        if _is_refusal(result.error):
            raise NotPossible(f"refused: {str(result.error).splitlines()[0]}")
        for found, whole in zip(result.get(), expected, strict=True):
            differences.append(largest_difference(found, {name: whole[name] for name in found}))
    return compared(max(differences), TOLERANCE)


def _mixed(world: World, dtype: torch.dtype, wraps: bool) -> Parameters:
    """Train in mixed precision, in float16 with a scaled loss; with or without rankwise."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3)).to(world.device)
    if wraps:
        rw.replicate(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kind = torch.device(world.device).type
    scaler = torch.amp.GradScaler(kind, enabled=dtype == torch.float16, init_scale=2.0**10)
    for x, y in batches((12, 7, 5)):
        with torch.autocast(kind, dtype=dtype):
            output = model(x.float().to(world.device))
            loss = nn.functional.mse_loss(output.float(), y.float().to(world.device))
        assert output.dtype == dtype
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return parameters_of(model)


def _precision(dtype: torch.dtype, setting: Setting) -> str:
    expected = setting.shared(_mixed, 1, dtype, False)[0]
    return compared(largest_difference(setting.alone(_mixed, dtype, True), expected), AMP_TOLERANCE)


def _compiled(world: World, compiler: str | None) -> Parameters:
    model: Any = built(lambda: nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3))).to(world.device)
    rw.replicate(model)
    run = model if compiler is None else torch.compile(model, backend=compiler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches((12, 12, 12)):
        nn.functional.mse_loss(run(x.to(world.device)), y.to(world.device)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return parameters_of(model)


def _compile(setting: Setting) -> str:
    expected = setting.alone(_compiled, None)
    compiler = "inductor" if setting.is_cuda else "aot_eager"
    found = setting.alone(_compiled, compiler, seconds=90.0)
    return f"{compiler}, {compared(largest_difference(found, expected), TOLERANCE)}"


def _batches(world: World, num_workers: int) -> list[list[float]]:
    data = TensorDataset(torch.arange(float(NUM_SAMPLES)), torch.arange(float(NUM_SAMPLES)) * 2)
    dataset = [data[index] for index in range(len(data))] if num_workers else data
    found = []
    for x, y in rw.DataLoader(dataset, global_batch_size=7, shuffle=True, num_workers=num_workers):
        assert str(x.device) == str(y.device) == world.device
        assert torch.equal(x * 2, y)
        found.append(x.tolist())
    return found


def _loader(num_workers: int, setting: Setting) -> str:
    (found,) = setting.shared(_batches, 1, num_workers)
    assert found == setting.on_cpu(_batches, 0)
    return f"{len(found)} batches in order"


def _resumable(world: World, folder: str, stops: bool, asynchronous: bool) -> Parameters:
    torch.manual_seed(3)
    x, y = torch.randn(NUM_SAMPLES, 5), torch.randn(NUM_SAMPLES, 2)
    layers = [nn.Linear(5, 7, bias=False), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 2)]
    model = rw.replicate(nn.Sequential(*layers).to(world.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    loader = rw.DataLoader(TensorDataset(x, y), global_batch_size=8, shuffle=True)
    num_steps = 0
    with rw.Checkpointer(folder, asynchronous=asynchronous) as checkpoints:
        checkpoints.restore(model=model, optimizer=optimizer, loader=loader)
        for _ in range(loader.epoch, EPOCHS):
            for x_part, y_part in loader:
                nn.functional.mse_loss(model(x_part), y_part).backward()
                optimizer.step()
                optimizer.zero_grad()
                num_steps += 1
                if stops and num_steps == SAVES_AFTER:
                    checkpoints.save(model=model, optimizer=optimizer, loader=loader)
                    # What is saved is what was there at that moment.
                    with torch.no_grad():
                        model[0].weight.zero_()
                    return {}
    return parameters_of(model)


def _resume(asynchronous: bool, setting: Setting) -> str:
    expected = setting.alone(_resumable, tempfile.mkdtemp(), False, asynchronous)
    folder = tempfile.mkdtemp()
    setting.alone(_resumable, folder, True, asynchronous)
    found = setting.alone(_resumable, folder, False, asynchronous)
    different = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not different, f"differ: {', '.join(different)}"
    return "equal bits"


def _name(strategy: str, sizes: dict[str, int]) -> str:
    num_ranks = torch.Size(sizes.values()).numel()
    return f"{strategy}, {num_ranks} rank{'s' * (num_ranks > 1)}{' (tensor_parallel)' * ('tp' in sizes)}"


STRATEGIES = [
    *[Check(_name(*way), partial(_spread, *way)) for way in WAYS],
]
TOOLS = [
    *[Check(f"autocast {str(dtype)[6:]}", partial(_precision, dtype)) for dtype in (torch.bfloat16, torch.float16)],
    *[Check(f"loader, {workers} workers", partial(_loader, workers)) for workers in (0, 2)],
    *[Check(f"checkpoint{', asynchronous' * wait}, resumed", partial(_resume, wait)) for wait in (False, True)],
    Check("torch.compile", _compile),
]
