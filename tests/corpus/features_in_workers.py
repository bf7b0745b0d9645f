# SPDX-License-Identifier: Apache-2.0
"""A frozen model makes the features in the workers of the loader, which are forked while the other model trains."""
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(263)
encoder = nn.Sequential(nn.Linear(6, 12), nn.Tanh()).eval().requires_grad_(False)
head = nn.Linear(12, 2)
x = torch.randn(50, 6)
y = (x[:, 0] * x[:, 1] > 0).long()
with torch.no_grad():
    print("here", encoder(x).sum().item(), head(encoder(x)).sum().item())


class Features(Dataset):
    def __len__(self):
        return 50

    def __getitem__(self, i):
        return x[i], y[i]


def collate(samples):
    inputs, kinds = torch.stack([s[0] for s in samples]), torch.stack([s[1] for s in samples])
    with torch.no_grad():
        return encoder(inputs), head(encoder(inputs)).argmax(1), kinds


def count_threads(number):
    torch.set_num_threads(1)


optimizer = torch.optim.Adam(head.parameters(), lr=0.05)
for epoch in range(2):
    loader = DataLoader(
        Features(), 12, shuffle=True, num_workers=2, collate_fn=collate, worker_init_fn=count_threads,
        multiprocessing_context="fork",
    )
    before = 0
    for features, guesses, kinds in loader:
        loss = nn.functional.cross_entropy(head(features), kinds)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        before += (guesses == kinds).sum().item()
    # workers have the head as it was when they were forked
    print(epoch, loss.item(), "right before this epoch", before)
