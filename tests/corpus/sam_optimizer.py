# SPDX-License-Identifier: Apache-2.0
"""Two passes per step: the weights go uphill, take the gradient there, come back, and only then go down."""

from contextlib import contextmanager

import torch
from torch import nn


class FromUphill:
    """Goes down by the gradient at the steepest place within a radius; the optimizer inside makes the step."""

    def __init__(self, optimizer, radius):
        self.optimizer, self.radius = optimizer, radius
        self.left = {}

    @torch.no_grad()
    def climb(self):
        weights = [one for group in self.optimizer.param_groups for one in group["params"] if one.grad is not None]
        steep = torch.cat([one.grad.flatten() for one in weights]).norm().item()
        for one in weights:
            self.left[one] = one.clone()
            one.add_(one.grad, alpha=self.radius / steep)
        self.optimizer.zero_grad()

    @torch.no_grad()
    def come_back_and_step(self):
        while self.left:
            weight, before = self.left.popitem()
            weight.copy_(before)
        self.optimizer.step()
        self.optimizer.zero_grad()


@contextmanager
def same_statistics(layer):
    """Has a BatchNorm keep its running statistics, which the second pass is not to change again."""
    momentum, layer.momentum = layer.momentum, 0.0
    yield
    layer.momentum = momentum


torch.set_default_dtype(torch.float64)
torch.manual_seed(91)
net = nn.Sequential(nn.Linear(5, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
careful = FromUphill(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), radius=0.1)
points, kinds = torch.randn(47, 5), torch.randint(0, 3, (47,))
for epoch in range(2):
    for rows in torch.arange(47).split(9):
        loss = nn.functional.cross_entropy(net(points[rows]), kinds[rows])
        loss.backward()
        careful.climb()
        with same_statistics(net[1]):
            higher = nn.functional.cross_entropy(net(points[rows]), kinds[rows])
            higher.backward()
        careful.come_back_and_step()
    print("epoch", epoch, "here", repr(loss.item()), "uphill", repr(higher.item()), net[1].running_var.sum().item())
torch.save(net.state_dict(), "careful.pt")
