# SPDX-License-Identifier: Apache-2.0
"""Hogwild: two processes of its own train one shared model."""
import torch
import torch.multiprocessing as mp
from torch import nn


def train(rank, model):
    torch.manual_seed(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(3):
        x = torch.randn(8, 4)
        loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(rank, "done", flush=True)


if __name__ == "__main__":
    torch.manual_seed(1)
    model = nn.Linear(4, 1)
    model.share_memory()
    mp.spawn(train, args=(model,), nprocs=2)
