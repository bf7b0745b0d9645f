# SPDX-License-Identifier: Apache-2.0
"""The rate falls and restarts; the weights at the end of each fall are kept, and vote together."""

import copy
import math

import numpy as np
import torch
from torch import nn

FALL, FALLS, HIGHEST = 3, 2, 0.3
np.random.seed(23)
torch.manual_seed(23)
torch.set_default_dtype(torch.float64)
points = np.random.uniform(-2, 2, (64, 2))
above = (points[:, 1] > np.cos(2 * points[:, 0])).astype(int)
net = nn.Sequential(nn.Linear(2, 20), nn.CELU(), nn.Linear(20, 20), nn.CELU(), nn.Linear(20, 2))
optimizer = torch.optim.SGD(net.parameters(), lr=HIGHEST)
kept = []
for epoch in range(FALL * FALLS):
    optimizer.param_groups[0]["lr"] = HIGHEST * math.cos(math.pi / 2 * (epoch % FALL) / FALL) ** 2
    for rows in np.array_split(np.random.permutation(48), 5):
        loss = nn.functional.cross_entropy(net(torch.from_numpy(points[rows])), torch.from_numpy(above[rows]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("epoch", epoch, "rate", optimizer.param_groups[0]["lr"], "loss", repr(loss.item()))
    if epoch % FALL == FALL - 1:
        kept.append(copy.deepcopy(net.state_dict()))
        torch.save(kept[-1], f"after_{epoch}.pt")
tests, truth = torch.from_numpy(points[48:]), torch.from_numpy(above[48:])
votes = torch.zeros(16, 2)
for weights in kept:
    voter = copy.deepcopy(net).eval()
    voter.load_state_dict(weights)
    with torch.no_grad():
        votes += voter(tests).softmax(1) / len(kept)
print("right", int((votes.argmax(1) == truth).sum()), "surprise", nn.functional.nll_loss(votes.log(), truth).item())
