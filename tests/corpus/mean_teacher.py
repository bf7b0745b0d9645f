# SPDX-License-Identifier: Apache-2.0
"""Few points have labels; on the others a net is to agree with its slow copy. Two loaders, the short one repeated."""

import copy
import itertools

import torch
from sklearn.datasets import make_circles
from torch import nn
from torch.utils.data import DataLoader

torch.set_default_dtype(torch.float64)
torch.manual_seed(8)
points, ring = (torch.tensor(part) for part in make_circles(90, noise=0.05, factor=0.4, random_state=8))
labelled = DataLoader(list(zip(points[:14], ring[:14])), batch_size=5, shuffle=True)
others = DataLoader(points[14:], batch_size=19, shuffle=True)
net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))
slow = copy.deepcopy(net).requires_grad_(False)
optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9, nesterov=True)


def shaken(points):
    return points + 0.05 * torch.randn_like(points)


for epoch in range(4):
    trust = min(1.0, epoch / 3)
    for unknown, (known, its_ring) in zip(others, itertools.cycle(labelled)):
        together = torch.cat([unknown, known])
        mine = net(shaken(together))
        with torch.no_grad():
            wanted = slow(shaken(together))
        apart = (mine.softmax(1) - wanted.softmax(1)).square().mean()
        loss = nn.functional.cross_entropy(mine[len(unknown) :], its_ring)
        optimizer.zero_grad()
        (loss + 3 * trust * apart).backward()
        optimizer.step()
        with torch.no_grad():
            for behind, ahead in zip(slow.parameters(), net.parameters()):
                behind.lerp_(ahead, 0.1)
    slow.eval()
    right = int((slow(points).argmax(1) == ring).sum())
    slow.train()
    print("epoch", epoch, "loss", repr(loss.item()), "apart", repr(apart.item()), "right", right)
