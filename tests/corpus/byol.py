# SPDX-License-Identifier: Apache-2.0
import copy

import torch
from torch import nn


def mlp(i, h, o):
    return nn.Sequential(nn.Linear(i, h), nn.BatchNorm1d(h), nn.ReLU(), nn.Linear(h, o))


class EMA:
    def __init__(self, beta):
        self.beta = beta

    def update_average(self, old, new):
        return old * self.beta + (1 - self.beta) * new


class BYOL(nn.Module):
    def __init__(self, beta=0.9):
        super().__init__()
        self.online = nn.Sequential(mlp(8, 16, 6), mlp(6, 12, 4))
        self.predictor = mlp(4, 8, 4)
        self.target = copy.deepcopy(self.online)
        for p in self.target.parameters():
            p.requires_grad = False
        self.ema = EMA(beta)

    def update_moving_average(self):
        for cur, ma in zip(self.online.parameters(), self.target.parameters()):
            ma.data = self.ema.update_average(ma.data, cur.data)

    def forward(self, one, two):
        p1, p2 = self.predictor(self.online(one)), self.predictor(self.online(two))
        with torch.no_grad():
            t1, t2 = self.target(one), self.target(two)
        loss = self.loss(p1, t2.detach()) + self.loss(p2, t1.detach())
        return loss.mean()

    @staticmethod
    def loss(a, b):
        a, b = nn.functional.normalize(a, dim=-1), nn.functional.normalize(b, dim=-1)
        return 2 - 2 * (a * b).sum(dim=-1)


torch.set_default_dtype(torch.float64)
torch.manual_seed(9)
learner = BYOL()
opt = torch.optim.Adam([p for p in learner.parameters() if p.requires_grad], lr=3e-3)
data = torch.randn(45, 8)
for epoch in range(3):
    for idx in torch.randperm(45).split(10):
        x = data[idx]
        loss = learner(x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x))
        opt.zero_grad()
        loss.backward()
        opt.step()
        learner.update_moving_average()
    print(epoch, repr(loss.item()))
torch.save(learner.target.state_dict(), "improved-net.pt")
