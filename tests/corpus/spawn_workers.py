# SPDX-License-Identifier: Apache-2.0
"""Two processes of its own train one shared model in turns; the script trains before, and evaluates afterwards."""
import torch
import torch.multiprocessing as mp
from torch import nn


def train(rank, model, turns):
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(3):
        turns[rank].acquire()
        x = torch.randn(8, 4)
        loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(rank, loss.item(), flush=True)
        turns[1 - rank].release()


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x = torch.randn(31, 4)
    for part in x.split(7):
        loss = (model(part) - part.sum(1, keepdim=True)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("alone", loss.item(), flush=True)
    model.share_memory()
    context = mp.get_context("spawn")
    mp.spawn(train, args=(model, [context.Semaphore(1), context.Semaphore(0)]), nprocs=2)
    with torch.no_grad():
        print("afterwards", (model(x) - x.sum(1, keepdim=True)).pow(2).mean().item(), model.weight.tolist())
