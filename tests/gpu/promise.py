# SPDX-License-Identifier: Apache-2.0
"""Parts that hold the promise: what ranks on a GPU compute is what one rank on the CPU computes, in float64."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from replicas import TOLERANCE, Net, Parameters, batches, built, largest_difference, part
from setting import Check, compared
from torch import nn

import rankwise as rw
from rankwise.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from setting import Setting

    from rankwise.world.facts import World

SCRIPT = """
import torch, rankwise as rw
with rw.join() as world:
    model = rw.replicate(torch.nn.Linear(4, 1).to(world.device))
    model(torch.ones(2, 4, device=world.device)).sum().backward()
    rw.print("trained on", world.device)
"""
COMMAND_SECONDS = 40.0


def parameters_of(model: nn.Module) -> Parameters:
    """Return the state of a model, on the CPU."""
    return {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}


MODELS: dict[str, Callable[[], nn.Module]] = {
    "layers": Net,
    "BatchNorm": partial(Net, batchnorm=True),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 3)), nn.Conv1d(2, 5, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(15, 3)
    ),
    "dropout": lambda: nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.4), nn.Linear(16, 3)),
}


def _net(name: str, device: str) -> nn.Module:
    model = built(MODELS[name]).to(device)
    if isinstance(model, Net):
        # On a device of torch's PrivateUse1, to() makes new parameters, one for each name.
        model.tied.weight = model.second.weight
    return model


def train(
    world: World, name: str, sizes: tuple[int, ...] = (12, 7, 2, 5), micro: int = 1, plain: bool = False
) -> Parameters:
    """Train on this rank's part of each batch, with momentum and clipped gradients; ``plain`` without rankwise."""
    model = _net(name, world.device)
    if not plain:
        rw.replicate(model, sync_batchnorm=name == "BatchNorm")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x, y in batches(sizes):
        for index in range(micro):
            own = [part(part(one, index, micro), world.rank, world.world_size).to(world.device) for one in (x, y)]
            with rw.no_sync(model) if index < micro - 1 and not plain else torch.enable_grad():
                nn.functional.mse_loss(model(own[0]), own[1]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return parameters_of(model)


def _train_with_dropout(world: World) -> Parameters:
    """Train on batches of a loader, without which a model does not know which samples it draws for."""
    model = rw.replicate(_net("dropout", world.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in rw.DataLoader(batches((37,))[0], global_batch_size=8, shuffle=True):
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return parameters_of(model)


def _collectives(world: World) -> str:
    rank, size, device = world.rank, world.world_size, world.device
    own = torch.arange(3.0, device=device) + rank
    ranks = range(size)
    expected = torch.arange(3.0) * size + sum(ranks)
    assert torch.equal(rw.all_reduce(own).cpu(), expected)
    assert torch.equal(rw.all_reduce(own, "mean").cpu(), expected / size)
    assert torch.equal(rw.all_reduce(own.bfloat16()).float().cpu(), expected)
    assert rw.all_reduce(torch.tensor(rank == 0, device=device), "max").item()
    assert [one[0].item() for one in rw.all_gather(own)] == list(ranks)
    assert rw.broadcast(own, size - 1)[0].item() == size - 1
    assert rw.reduce_scatter(torch.ones(size, 2, device=device)).flatten().tolist() == [size, size]
    assert [one[0].item() for one in rw.all_to_all([own + other for other in ranks])] == [rank + one for one in ranks]
    assert rw.all_gather_object({"rank": rank}) == [{"rank": one} for one in ranks]
    assert rw.broadcast_object([1, "two"], 0) == [1, "two"]
    strided = torch.arange(12.0, device=device).view(3, 4).t()
    assert torch.equal(rw.all_reduce(strided).cpu(), strided.cpu() * size)
    if size > 1:
        if rank == 0:
            rw.send(own, 1)
        if rank == 1:
            assert torch.equal(rw.recv(0).cpu(), torch.arange(3.0))
    group = rw.new_group([0])
    assert rank or torch.equal(rw.all_reduce(own, group=group), own)
    rw.barrier()
    return f"{device}, {world.backend}"


def _joins(setting: Setting) -> str:
    return str(setting.alone(_collectives))


def _same_as_plain(name: str, setting: Setting) -> str:
    plain = run_ranks(train, 1, name, (12, 7, 2, 5), 1, True, device=setting.device)[0].get()
    return compared(largest_difference(setting.alone(train, name), plain), TOLERANCE)


def _on_device(world: World) -> str:
    return world.device


def _joins_by_default(setting: Setting) -> str:
    device = None if setting.kind != "cpu" else "cpu"
    found = run_ranks(_on_device, 1, device=device)[0].get()
    assert found == setting.device, found
    return str(found)


def _command(setting: Setting, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "rankwise", *words], capture_output=True, text=True, check=False, timeout=COMMAND_SECONDS
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]
    return done.stdout


def _rankwise_run(setting: Setting) -> str:
    Path("train.py").write_text(SCRIPT)
    output = _command(setting, "run", "-n", "1", *(["--device", "cpu"] if setting.kind == "cpu" else []), "train.py")
    assert f"trained on {setting.device}" in output, output
    return setting.device


def _doctor(setting: Setting) -> str:
    report = json.loads(_command(setting, "doctor", "--json", "--port", "0"))
    return ", ".join(f"{one['check']}: {one['what']}" for one in report["findings"] if one["check"] == "GPUs")


CASES: dict[str, tuple[Any, ...]] = {
    "odd sizes": ("layers",),
    "accumulation": ("layers", (12, 7, 13), 3),
    "convolution": ("convolution",),
    "BatchNorm": ("BatchNorm", (12, 9, 13), 2),
}


def _case(name: str, num_ranks: int, setting: Setting) -> str:
    args = CASES[name]
    expected = setting.on_cpu(train, *args)
    return compared(
        max(largest_difference(found, expected) for found in setting.shared(train, num_ranks, *args)), TOLERANCE
    )


def _dropout(num_ranks: int, setting: Setting) -> str:
    (expected,) = setting.shared(_train_with_dropout, 1)
    found = setting.shared(_train_with_dropout, num_ranks)
    return compared(max(largest_difference(one, expected) for one in found), TOLERANCE)


def _collectives_shared(num_ranks: int, setting: Setting) -> str:
    return str(setting.shared(_collectives, num_ranks)[0])


def _own_backend(num_ranks: int, setting: Setting) -> str:
    options = setting.own_backend(num_ranks)
    figures = [result.get() for result in run_ranks(_collectives, num_ranks, **options)][:1]
    for name, args in CASES.items():
        expected = setting.on_cpu(train, *args)
        found = [result.get() for result in run_ranks(train, num_ranks, *args, **options)]
        figures.append(f"{name} {compared(max(largest_difference(one, expected) for one in found), TOLERANCE)}")
    return "; ".join(figures)


def _masks(world: World, shape: tuple[int, ...]) -> torch.Tensor:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Dropout(0.3))
    nn.init.ones_(model[0].weight)
    rw.replicate(model.to(world.device))
    return (model(torch.ones(*shape, 1, device=world.device)) != 0).cpu()


def _bits(shape: tuple[int, ...], setting: Setting) -> str:
    (found,) = setting.shared(_masks, 1, shape)
    expected = setting.on_cpu(_masks, shape)
    share = (found != expected).double().mean().item()
    assert not share, f"{share:.0%} of the bits differ from those of the CPU"
    return f"{expected.numel()} bits equal"


ONE_RANK = [
    Check("joins its device", _joins_by_default),
    Check("collectives through the device's backend", _joins),
    *[Check(f"replicate = plain PyTorch, {name}", partial(_same_as_plain, name)) for name in ("layers", "BatchNorm")],
    Check("rankwise run", _rankwise_run),
    Check("rankwise doctor", _doctor),
]
PROMISES = [
    *[Check("collectives, 2 ranks on one device", partial(_collectives_shared, 2))],
    *[Check(f"{name}, {ranks} ranks", partial(_case, name, ranks)) for ranks in (2, 4) for name in CASES],
    *[Check(f"dropout, {ranks} ranks", partial(_dropout, ranks)) for ranks in (2, 4)],
    Check("all of these, 2 ranks through the device's backend", partial(_own_backend, 2)),
]
RANDOM_NUMBERS = [
    Check(f"dropout's bits, {' x '.join(map(str, shape))}", partial(_bits, shape)) for shape in ((64, 100), (1000, 400))
]
