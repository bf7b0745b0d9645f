# SPDX-License-Identifier: Apache-2.0
"""Stochastic gradient Langevin dynamics: noise on the parameters in each step, predictions averaged."""
import math

import torch
from torch import nn
from torch.optim.optimizer import Optimizer


class SGLD(Optimizer):
    def __init__(self, params, lr, temperature=1e-3, weight_decay=1e-2):
        super().__init__(params, dict(lr=lr, temperature=temperature, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                d_p = p.grad + group["weight_decay"] * p
                p.add_(d_p, alpha=-group["lr"])
                p.add_(torch.randn_like(p), alpha=math.sqrt(2 * group["lr"] * group["temperature"]))


def main():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(44)
    net = nn.Sequential(nn.Linear(2, 15), nn.Tanh(), nn.Linear(15, 1))
    opt = SGLD(net.parameters(), lr=0.05)
    x = torch.randn(52, 2)
    y = x.sum(1, keepdim=True).tanh()
    kept = []
    for it in range(24):
        rows = torch.randint(0, 52, (15,))
        loss = (net(x[rows]) - y[rows]).square().mean()
        net.zero_grad()
        loss.backward()
        opt.step()
        if it >= 8 and it % 4 == 0:
            with torch.no_grad():
                kept.append(net(x))
            print(it, loss.item())
    mean = torch.stack(kept).mean(0)
    print("ensemble of", len(kept), "mse", (mean - y).square().mean().item(), "spread", torch.stack(kept).std(0).mean().item())


if __name__ == "__main__":
    main()
