# SPDX-License-Identifier: Apache-2.0
"""A large net learns from labels; a small one from the labels and from how sure the large one is of each class."""
import torch
from torch import nn
from torch.nn import functional as F

torch.set_default_dtype(torch.float64)
torch.manual_seed(42)
SOFTER = 2.0


class Large(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(9, 40), nn.ReLU(), nn.Linear(40, 30), nn.ReLU(), nn.Dropout(0.1))
        self.head = nn.Linear(30, 5)

    def forward(self, rows):
        return self.head(self.trunk(rows))


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(9, 10), nn.Linear(10, 5)

    def forward(self, rows):
        return self.head(F.relu(self.inner(rows)))


def from_labels(rows, scores, kinds):
    return F.cross_entropy(scores, kinds)


def from_large_too(rows, scores, kinds):
    with torch.no_grad():
        sure = F.log_softmax(large(rows) / SOFTER, 1)
    apart = F.kl_div(F.log_softmax(scores / SOFTER, 1), sure, reduction="batchmean", log_target=True)
    return torch.lerp(apart * SOFTER**2, F.cross_entropy(scores, kinds), 0.75)


def taught(net, loss_of, epochs):
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for epoch in range(epochs):
        net.train()
        total = 0.0
        for which in torch.randperm(90).split(25):
            loss = loss_of(rows[which], net(rows[which]), kinds[which])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(which)
        net.eval()
        found = torch.cat([net(part).argmax(1) for part in rows[90:].split(25)])
        right = (found == kinds[90:]).sum().item()
        print(type(net).__name__, "epoch", epoch, "loss", repr(total / 90), "right", right, "of 30")
    return net


kinds = torch.arange(120) % 5
rows = torch.randn(5, 9)[kinds] + 0.7 * torch.randn(120, 9)
large, small = Large(), Small()
taught(large, from_labels, 3)
taught(small, from_large_too, 2)
print("weights of the small net, summed:", small.inner.weight.sum().item(), small.head.weight.sum().item())
