# SPDX-License-Identifier: Apache-2.0
"""Learns, checks, and goes back to the weights of the epoch that did best."""
import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)


class Stripes(Dataset):
    """Images with horizontal, vertical or diagonal stripes, with noise."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        yy, xx = torch.meshgrid(torch.arange(12.0), torch.arange(12.0), indexing="ij")
        self.labels = torch.randint(0, 3, (n,), generator=g)
        waves = torch.stack([torch.sin(yy), torch.sin(xx), torch.sin(yy + xx)])
        self.images = waves[self.labels].unsqueeze(1) + 0.5 * torch.randn(n, 1, 12, 12, generator=g)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.images[i], self.labels[i]


class StripeReader(nn.Module):
    def __init__(self):
        super().__init__()
        self.look = nn.Conv2d(1, 6, 3, padding=1)
        self.calm = nn.BatchNorm2d(6)
        self.combine = nn.Conv2d(6, 8, 3, padding=1)
        self.calm_again = nn.BatchNorm2d(8)
        self.forget = nn.Dropout2d(0.2)
        self.choose = nn.Linear(72, 3)

    def forward(self, images):
        seen = nn.functional.max_pool2d(self.calm(self.look(images)).relu(), 2)
        seen = self.forget(self.calm_again(self.combine(seen)).relu())
        return self.choose(nn.functional.max_pool2d(seen, 2).flatten(1))


def go_through(net, loader, optimizer=None):
    """Return the mean loss and the share of images that are read rightly; learn if there is an optimizer."""
    net.train(optimizer is not None)
    losses, right = 0.0, 0
    for images, labels in loader:
        with torch.set_grad_enabled(net.training):
            scores = net(images)
            loss = nn.functional.cross_entropy(scores, labels)
        if optimizer:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses += loss.item() * len(labels)
        right += (scores.argmax(1) == labels).sum().item()
    return losses / len(loader.dataset), right / len(loader.dataset)


learnt = DataLoader(Stripes(75, 1), batch_size=13, shuffle=True)
checked = DataLoader(Stripes(40, 2), batch_size=13)
net = StripeReader()
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
best, kept = float("inf"), None
for epoch in range(3):
    loss, share = go_through(net, learnt, optimizer)
    print(f"{epoch} learns: loss {loss:.12g}, right {share:.6f}")
    loss, share = go_through(net, checked)
    print(f"{epoch} checks: loss {loss:.12g}, right {share:.6f}")
    if loss < best:
        best, kept = loss, copy.deepcopy(net.state_dict())
        torch.save(kept, "stripes.pt")
net.load_state_dict(kept)
print("best", repr(best), "and again", *go_through(net, checked))
