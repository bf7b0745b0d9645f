# SPDX-License-Identifier: Apache-2.0
import copy
import math

import numpy as np
import torch
from torch import nn

np.random.seed(23)
torch.manual_seed(23)
torch.set_default_dtype(torch.float64)


def proposed_lr(initial_lr, iteration, epoch_per_cycle):
    return initial_lr * (math.cos(math.pi * (iteration % epoch_per_cycle) / epoch_per_cycle) + 1) / 2


xs = np.random.uniform(-2, 2, (64, 2))
ys = (np.sin(2 * xs[:, 0]) > xs[:, 1]).astype(np.int64)
xt, yt = torch.as_tensor(xs[48:]), torch.as_tensor(ys[48:])
model = nn.Sequential(nn.Linear(2, 20), nn.CELU(), nn.Linear(20, 20), nn.CELU(), nn.Linear(20, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
snapshots = []
for cycle in range(2):
    for j in range(3):
        for g in optimizer.param_groups:
            g["lr"] = proposed_lr(0.3, j, 3)
        order = np.random.permutation(48)
        for part in np.array_split(order, 5):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(torch.as_tensor(xs[part])), torch.as_tensor(ys[part]))
            loss.backward()
            optimizer.step()
        print("cycle", cycle, "epoch", j, "lr", optimizer.param_groups[0]["lr"], "loss", loss.item())
    snapshots.append(copy.deepcopy(model.state_dict()))
    torch.save(snapshots[-1], f"snapshot_{cycle}.pt")
outputs = []
for weights in snapshots:
    member = copy.deepcopy(model)
    member.load_state_dict(weights)
    member.eval()
    with torch.no_grad():
        outputs.append(member(xt).softmax(1))
vote = torch.stack(outputs).mean(0)
print("ensemble accuracy", (vote.argmax(1) == yt).double().mean().item(), "nll", -vote[torch.arange(16), yt].log().mean().item())
