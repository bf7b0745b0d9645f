# SPDX-License-Identifier: Apache-2.0
import numpy as np
import torch
from torch import nn


class MF(nn.Module):
    def __init__(self, n_users, n_items, k, sparse):
        super().__init__()
        self.user = nn.Embedding(n_users, k, sparse=sparse)
        self.item = nn.Embedding(n_items, k, sparse=sparse)
        self.user_bias = nn.Embedding(n_users, 1, sparse=sparse)
        self.item_bias = nn.Embedding(n_items, 1, sparse=sparse)
        self.user.weight.data.uniform_(-0.1, 0.1)
        self.item.weight.data.uniform_(-0.1, 0.1)
        self.user_bias.weight.data.zero_()
        self.item_bias.weight.data.zero_()

    def forward(self, u, i):
        dot = (self.user(u) * self.item(i)).sum(1)
        return dot + self.user_bias(u).squeeze(1) + self.item_bias(i).squeeze(1)


def ratings(n_users=18, n_items=14):
    rng = np.random.RandomState(0)
    p, q = rng.randn(n_users, 2), rng.randn(n_items, 2)
    full = p @ q.T
    known = np.argwhere(rng.rand(n_users, n_items) < 0.4)
    return known, full[known[:, 0], known[:, 1]]


def fit(sparse):
    torch.manual_seed(0)
    pairs, values = ratings()
    pairs, values = torch.from_numpy(pairs), torch.from_numpy(values)
    model = MF(18, 14, 3, sparse)
    opt = torch.optim.SparseAdam(list(model.parameters()), lr=0.05) if sparse else torch.optim.Adam(model.parameters(), lr=0.05, weight_decay=1e-5)
    for epoch in range(3):
        se = 0.0
        for rows in torch.randperm(len(pairs)).split(16):
            u, i, r = pairs[rows, 0], pairs[rows, 1], values[rows]
            loss = ((model(u, i) - r) ** 2).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            se += loss.item() * len(rows)
        print(f"sparse={sparse} epoch={epoch} rmse={(se / len(pairs)) ** 0.5:.12g}")
    print("gradient is sparse:", model.user.weight.grad.is_sparse)


torch.set_default_dtype(torch.float64)
fit(False)
fit(True)
