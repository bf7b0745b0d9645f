# SPDX-License-Identifier: Apache-2.0
# Reads whole batches from arrays at once: sampler=BatchSampler(...), batch_size=None.
import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

torch.manual_seed(14)
torch.set_default_dtype(torch.float64)


class ArrayDataset(Dataset):
    def __init__(self, n):
        rs = np.random.RandomState(3)
        self.x = rs.randn(n, 5)
        self.y = self.x @ rs.randn(5, 2)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, idx):
        return self.x[idx], self.y[idx]


ds = ArrayDataset(58)
loader = DataLoader(ds, sampler=BatchSampler(RandomSampler(ds), batch_size=11, drop_last=False), batch_size=None)
lin = torch.nn.Linear(5, 2)
opt = torch.optim.Rprop(lin.parameters(), lr=0.01)
for e in range(3):
    sizes = []
    for x, y in loader:
        sizes.append(len(x))
        opt.zero_grad()
        loss = torch.nn.functional.huber_loss(lin(x), y)
        loss.backward()
        opt.step()
    print(e, sizes, loss.item())
print("max error of weights", (lin(torch.from_numpy(ds.x)) - torch.from_numpy(ds.y)).abs().max().item())
