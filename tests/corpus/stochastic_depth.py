# SPDX-License-Identifier: Apache-2.0
"""Layers dropped by a coin of random.random(), embeddings with max_norm, a counter on the model."""
import random

import torch
from torch import nn

random.seed(0)
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(9, 6, max_norm=1.0)
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])
        self.out = nn.Linear(6, 1)
        self.num_calls = 0
        self.dropped = []

    def forward(self, ids):
        self.num_calls += 1
        h = self.emb(ids).mean(1)
        for i, layer in enumerate(self.layers):
            if self.training and random.random() < 0.1 * i:
                self.dropped.append(i)
                continue
            h = h + torch.tanh(layer(h))
        return self.out(h).squeeze(1)


net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for epoch in range(2):
    for _ in range(5):
        ids = torch.randint(0, 9, (11, 3))
        loss = (net(ids) - ids.double().mean(1) / 4).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(epoch, loss.item(), "calls", net.num_calls, "dropped", net.dropped)
torch.save(net, "net.pt")
