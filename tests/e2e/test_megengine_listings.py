# SPDX-License-Identifier: Apache-2.0
"""MegEngine's two listings of distributed training, run as scripts whose ``import megengine`` gives rankwise's.

MegEngine itself does not install here (no distribution of it fits this Python): each listing is compared with what one
process of torch computes.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

if TYPE_CHECKING:
    from conftest import Command

ALIAS = ("-m", "rankwise.compat.megengine")
SIZE, FEATURES, CLASSES, GLOBAL_BATCH, EPOCHS = 48, 6, 3, 12, 3

DATA_PARALLEL = """
import json
import sys

import numpy as np
import torch

import megengine as mge
import megengine.autodiff as ad
import megengine.distributed as dist
import megengine.optimizer as optim
from megengine import functional as F
from megengine import module as M
from megengine.data.dataloader import DataLoader
from megengine.data.dataset import ArrayDataset
from megengine.data.sampler import SequentialSampler

SIZE, FEATURES, CLASSES, GLOBAL_BATCH, EPOCHS, NUM_WORKERS = map(int, sys.argv[2:])
torch.set_default_dtype(torch.float64)

class Linear(M.Module):
    def __init__(self):
        super().__init__()
        self.w = mge.Parameter(np.full((FEATURES, CLASSES), float(dist.get_rank())))
        self.b = mge.Parameter(np.zeros((CLASSES,)))
        self.register_buffer("seen", mge.tensor([float(dist.get_rank())]))

    def forward(self, data):
        return F.matmul(F.flatten(data, 1), self.w) + self.b

def main():
    torch.set_default_dtype(torch.float64)
    generator = np.random.RandomState(0)
    data = ArrayDataset(generator.randn(SIZE, 2, FEATURES // 2), generator.randint(0, CLASSES, SIZE).astype("int32"))
    linear_cls = Linear()
    dist.bcast_list_(linear_cls.tensors())
    gm = ad.GradManager()
    gm.attach(linear_cls.parameters(), callbacks=[dist.make_allreduce_cb("sum")])
    ranks = dist.get_world_size()
    # A sum of gradients is that many times their mean, and the weight decay must be too.
    opt = optim.SGD(linear_cls.parameters(), lr=0.5 / ranks, momentum=0.9, weight_decay=1e-3 * ranks)
    sampler = SequentialSampler(data, batch_size=GLOBAL_BATCH // dist.get_world_size())
    data_loader = DataLoader(data, sampler=sampler, num_workers=NUM_WORKERS)
    losses = []
    for epoch in range(EPOCHS):
        total_loss = 0
        for data, label in data_loader:
            data = mge.tensor(data)
            label = mge.tensor(label)
            with gm:
                pred = linear_cls(data)
                loss = F.nn.cross_entropy(pred, label)
                gm.backward(loss)
            opt.step().clear_grad()
            loss = dist.functional.all_reduce_sum(loss) / dist.get_world_size()
            total_loss += loss.item()
        losses.append(total_loss / len(data_loader))
    assert all(parameter.grad is None for parameter in linear_cls.parameters())
    return [losses, linear_cls.seen.item(), *(parameter.tolist() for parameter in linear_cls.parameters())]

if __name__ == "__main__":
    print(json.dumps(dist.launcher(main, n_gpus=int(sys.argv[1]))()))
"""

MODEL_PARALLEL = """
import json
import sys

import numpy as np
import torch.nn as M

import megengine as mge
import megengine.autodiff as ad
import megengine.distributed as dist
import megengine.optimizer as optim

N_GPUS = int(sys.argv[1])

@dist.launcher(n_gpus=N_GPUS)
def main():
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    # The ranks share the shapes and dtypes to receive.
    client = dist.get_client()
    layer = M.Linear(2, 2)
    for parameter in layer.parameters():
        parameter.data.fill_(0.5 + rank)
    gm = ad.GradManager()
    opt = optim.SGD(layer.parameters(), lr=1e-2)
    gm.attach(layer.parameters())
    kept = []
    for step in range(3):
        with gm:
            if rank == 0:
                feat = mge.tensor(np.full(2, 0.5 + step))
            else:
                shape = client.user_get(f"shape{rank - 1}")
                dtype = client.user_get(f"dtype{rank - 1}")
                feat = dist.functional.remote_recv(src_rank=rank - 1, shape=shape, dtype=dtype)
            feat = layer(feat)
            if rank < last:
                client.user_set(f"shape{rank}", feat.shape)
                client.user_set(f"dtype{rank}", feat.dtype)
                dist.functional.remote_send(feat, dest_rank=rank + 1)
                gm.backward([])
            else:
                gm.backward(feat.sum())
            kept.append(layer.weight.grad.tolist())
            opt.step().clear_grad()
    return kept, layer.weight.tolist(), layer.bias.tolist()

if __name__ == "__main__":
    print(json.dumps(main()))
"""


def _run(command: Command, *words: str) -> tuple[list[list[float]], str]:
    """Run one Python program; return the last line that it printed, and what it reported."""
    ended = command.python(*words)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1]), ended.stderr


def _trained_by_torch() -> list[torch.Tensor]:
    generator = np.random.RandomState(0)
    x = torch.tensor(generator.randn(SIZE, FEATURES))
    y = torch.tensor(generator.randint(0, CLASSES, SIZE))
    w, b = torch.zeros(FEATURES, CLASSES, dtype=x.dtype), torch.zeros(CLASSES, dtype=x.dtype)
    parameters = [w.requires_grad_(), b.requires_grad_()]
    optimizer = torch.optim.SGD(parameters, lr=0.5, momentum=0.9, weight_decay=1e-3)
    for _ in range(EPOCHS):
        for part in torch.arange(SIZE).split(GLOBAL_BATCH):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(x[part] @ w + b, y[part]).backward()
            optimizer.step()
    return [parameter.detach() for parameter in parameters]


@pytest.mark.parametrize(("n_gpus", "num_workers"), [(1, 0), (2, 0), (3, 1)])
def test_the_data_parallel_listing(command: Command, n_gpus: int, num_workers: int) -> None:
    command.write("train.py", DATA_PARALLEL)
    numbers = (n_gpus, SIZE, FEATURES, CLASSES, GLOBAL_BATCH, EPOCHS, num_workers)
    found, reported = _run(command, *ALIAS, "train.py", *map(str, numbers))
    assert len(found) == n_gpus
    expected = _trained_by_torch()
    for losses, seen, *parameters in found:
        assert (losses, seen) == (found[0][0], 0.0)
        assert losses[0] > losses[-1]
        for parameter, same in zip(parameters, expected, strict=True):
            torch.testing.assert_close(torch.tensor(parameter, dtype=same.dtype), same, rtol=1e-11, atol=1e-13)
    assert "warning" not in reported, reported


def _parts_in_one_process(num_parts: int) -> list[tuple[list[list[float]], list[float], list[float]]]:
    layers = [torch.nn.Linear(2, 2) for _ in range(num_parts)]
    for rank, layer in enumerate(layers):
        for parameter in layer.parameters():
            parameter.data.fill_(0.5 + rank)
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    kept: list[list[list[float]]] = [[] for _ in layers]
    for step in range(3):
        model(torch.full((2,), 0.5 + step)).sum().backward()
        for gradients, layer in zip(kept, layers, strict=True):
            gradients.append(layer.weight.grad.tolist())
        optimizer.step()
        optimizer.zero_grad()
    return [
        (gradients, layer.weight.tolist(), layer.bias.tolist()) for gradients, layer in zip(kept, layers, strict=True)
    ]


@pytest.mark.parametrize("n_gpus", [2, 3])
def test_the_model_parallel_listing(command: Command, n_gpus: int) -> None:
    command.write("train.py", MODEL_PARALLEL)
    found, reported = _run(command, *ALIAS, "train.py", str(n_gpus))
    assert found == json.loads(json.dumps(_parts_in_one_process(n_gpus)))
    assert "warning" not in reported, reported


def test_a_listing_on_ranks_that_exist_already(command: Command) -> None:
    command.write("train.py", MODEL_PARALLEL)
    found, _ = _run(command, "-m", "rankwise", "run", "-n", "2", *ALIAS, "train.py", "2")
    assert found == json.loads(json.dumps(_parts_in_one_process(2)))
