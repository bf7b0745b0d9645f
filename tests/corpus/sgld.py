# SPDX-License-Identifier: Apache-2.0
"""An optimizer that adds noise to the weights in each step, so that the nets on the way can be averaged."""

import torch
from torch import nn


class Wander(torch.optim.Optimizer):
    def __init__(self, weights, lr, heat=1e-3, pull=1e-2):
        super().__init__(weights, {"lr": lr, "heat": heat, "pull": pull})

    def step(self):
        with torch.no_grad():
            for group in self.param_groups:
                for weight in group["params"]:
                    weight.mul_(1 - group["lr"] * group["pull"])
                    weight.sub_(group["lr"] * weight.grad)
                    weight.add_((2 * group["lr"] * group["heat"]) ** 0.5 * torch.randn_like(weight))


torch.set_default_dtype(torch.float64)
torch.manual_seed(44)
points = torch.randn(52, 2)
heights = points.sum(1, keepdim=True).tanh()
net = nn.Sequential(nn.Linear(2, 15), nn.Tanh(), nn.Linear(15, 1))
optimizer = Wander(net.parameters(), lr=0.05)
answers = []
for step in range(24):
    rows = torch.randint(0, 52, (15,))
    loss = nn.functional.mse_loss(net(points[rows]), heights[rows])
    net.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 4 == 3 and step > 8:
        with torch.no_grad():
            answers.append(net(points))
        print("step", step, "loss", repr(loss.item()))
spread, mean = torch.std_mean(torch.stack(answers), dim=0)
print(len(answers), "nets, together", nn.functional.mse_loss(mean, heights).item(), "apart", spread.mean().item())
