# SPDX-License-Identifier: Apache-2.0
"""Numpy arrays that forward() reads are written in place: a mask, class weights, a table of positions."""
import numpy as np
import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(37)
rng = np.random.default_rng(37)
MASK = np.ones(8)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(15, 8)
        self.out = nn.Linear(8, 3)
        self.table = np.zeros((6, 8))
        self.shared = torch.zeros(3)  # neither a parameter nor a buffer
        self.prior = self.shared.numpy()

    def forward(self, words):
        h = self.emb(words) + torch.from_numpy(self.table)
        h = h * torch.as_tensor(MASK)
        return self.out(h.relu().mean(1)) + self.shared


model = Tagger()
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
words = torch.from_numpy(rng.integers(0, 15, (52, 6)))
tags = torch.from_numpy(rng.integers(0, 3, 52))
for step in range(20):
    if step % 5 == 4:
        MASK[:] = rng.random(8) > 0.25
    if step == 6:
        model.table += 0.1 * rng.standard_normal((6, 8))
    if step == 11:
        model.table[2, 3] = 5.0  # one number of 48
    if step in (9, 13):
        model.prior[:] = np.log(np.bincount(tags[: 4 * step].numpy(), minlength=3) / (4 * step))
    rows = torch.from_numpy(rng.permutation(52)[:15])
    loss = nn.functional.cross_entropy(model(words[rows]), tags[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, int(MASK.sum()), loss.item())
np.savez("tables.npz", mask=MASK, table=model.table, prior=model.prior)
