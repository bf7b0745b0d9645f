# SPDX-License-Identifier: Apache-2.0
"""``rankwise run --guard``: hand-written scripts whose ranks part are named; those whose ranks agree are left alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Command

HEAD = """
import atexit, torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
torch.set_num_threads(1)
dist.init_process_group("gloo")
# A rank that has no collective of its own could end before the other has connected, for which Gloo fails there.
dist.barrier()
atexit.register(dist.destroy_process_group)
rank = dist.get_rank()
torch.manual_seed(0)
"""
TRAIN = """
model = {model}
trained = [*model.parameters(){more}]
optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
for step in range({steps}):
    x = torch.full((2, 3), 1.0 + rank)
    {before}
    loss = model(x).square().mean(){loss}
    loss.backward()
    {average}
    optimizer.step()
    optimizer.zero_grad()
    {after}
print("trained", rank, flush=True)
"""
DDP = "DistributedDataParallel(nn.Linear(3, 2))"
LINEAR = "nn.Linear(3, 2)"
AVERAGE = "[dist.all_reduce(p.grad) for p in trained]"
ON_RANK_ZERO = "torch.nn.init.ones_(model.module.weight.data) if rank == 0 and step == 2 else None"


def _script(
    model: str = DDP,
    *,
    after: str = "",
    before: str = "",
    more: str = "",
    loss: str = "",
    average: str = "",
    steps: int | str = 9,
) -> str:
    return HEAD + TRAIN.format(
        model=model,
        after=after or "pass",
        before=before or "pass",
        more=more,
        loss=loss,
        average=average or "pass",
        steps=steps,
    )


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (
            _script(after="scheduler.step(-step if rank == 0 else step)"),
            ["lr of SGD is not the same on all ranks after step ", "rank 0: 0.1\n", "by all_reduce"],
        ),
        (
            _script(after=ON_RANK_ZERO),
            [
                "Parameter weight is not the same on all ranks after step 4 of SGD.",
                "rank 0: norm 2.0",
                "1 of 2 tensors",
            ],
        ),
    ],
    ids=["plateau", "loaded on rank 0"],
)
def test_replicas_that_part_end_the_job(command: Command, script: str, words: list[str]) -> None:
    command.write("train.py", script)
    ended = command.run("--device", "cpu", "-n", "2", "--guard", "train.py")
    assert ended.returncode == 1, ended.stderr
    assert "rankwise.errors.ReplicasDiffer: " in ended.stderr
    for one in words:
        assert one in ended.stderr, ended.stderr
    assert command.run("--device", "cpu", "-n", "2", "train.py").returncode == 0


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (_script(LINEAR), "weight of Linear is not the same on all ranks after step 1 of SGD."),
        (
            _script(more=", centers := nn.Parameter(torch.ones(4))", loss=" + (centers * x.mean()).square().sum()"),
            "tensor 0 is not the same on all ranks after step 1 of SGD.",
        ),
        (
            _script(before="model.require_backward_grad_sync = step % 4 == 3"),
            "is not the same on all ranks after step 1 of SGD.",
        ),
    ],
    ids=["no wrapper", "a criterion", "local SGD"],
)
def test_a_difference_that_may_be_intended_is_a_warning_once(command: Command, script: str, words: str) -> None:
    command.write("train.py", script)
    ended = command.run("--device", "cpu", "-n", "2", "--guard", "train.py")
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("is not the same on all ranks") == 1
    assert words in ended.stderr
    assert "remove --guard" in ended.stderr


FOLDS = """
addresses = set()
is_last = torch.zeros(())
for fold in range(50):
    model = DistributedDataParallel(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    is_last += id(optimizer) in addresses or fold == 49
    dist.broadcast(is_last, 0)
    addresses.add(id(optimizer))
    for step in range(4):
        model(torch.ones(2, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if is_last and rank == 0 and step == 1:
            nn.init.ones_(model.module.weight.data)
    if is_last:
        break
    del optimizer
"""
"""Ranks part in the first fold whose optimizer has the address of one that is gone."""


def test_each_optimizer_of_a_loop_is_compared_from_its_first_step(command: Command) -> None:
    command.write("train.py", HEAD + FOLDS)
    ended = command.run("--device", "cpu", "-n", "2", "--guard", "train.py")
    assert ended.returncode == 1, ended.stderr
    assert "Parameter weight is not the same on all ranks after step 4 of SGD." in ended.stderr


@pytest.mark.parametrize(
    "script",
    [
        _script(),
        _script(LINEAR, average=AVERAGE),
        _script("nn.Linear(3, 2 + rank)"),
        _script(LINEAR, steps="9 if rank else 3").replace("1.0 + rank", "1.0"),
        _script(LINEAR)
        .replace('dist.init_process_group("gloo")', "")
        .replace("dist.barrier()", "")
        .replace("atexit.register(dist.destroy_process_group)", "")
        .replace("dist.get_rank()", "0"),
    ],
    ids=["DDP", "averaged by hand", "other shapes", "unequal steps", "no group"],
)
def test_no_report_for(command: Command, script: str) -> None:
    command.write("train.py", script)
    ended = command.run("--device", "cpu", "-n", "2", "--guard", "train.py")
    assert ended.returncode == 0, ended.stderr
    assert "not the same" not in ended.stderr
    assert ended.stdout.count("trained") == 2
