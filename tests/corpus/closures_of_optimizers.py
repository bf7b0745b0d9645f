# SPDX-License-Identifier: Apache-2.0
"""Closures: LBFGS with strong Wolfe, SGD's closure, Rprop, a subclassed optimizer, and closures that only evaluate."""
import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(257)
x = torch.randn(39, 2)
y = (x[:, :1] + 2 * x[:, 1:]).sin()


class Lookahead(torch.optim.SGD):
    def __init__(self, params, every, **options):
        super().__init__(params, **options)
        self.every, self.count = every, 0
        self.slow = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]

    @torch.no_grad()
    def step(self, closure=None):
        loss = super().step(closure)
        self.count += 1
        if self.count % self.every == 0:
            for group, slow in zip(self.param_groups, self.slow):
                for p, s in zip(group["params"], slow):
                    s += 0.5 * (p - s)
                    p.copy_(s)
        return loss


def fit(name, make, steps):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(2, 10), nn.Tanh(), nn.Linear(10, 1))
    optimizer = make(net)
    calls = []

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(x), y)
        if torch.is_grad_enabled():
            loss.backward()
        calls.append(loss.item())
        return loss

    for _ in range(steps):
        optimizer.step(closure)
    with torch.no_grad():
        last = closure().item()
    print(name, len(calls), calls[:3], last)


fit("L-BFGS", lambda net: torch.optim.LBFGS(net.parameters(), lr=1, max_iter=4, line_search_fn="strong_wolfe"), 3)
fit("SGD", lambda net: torch.optim.SGD(net.parameters(), lr=0.1, nesterov=True, momentum=0.9), 6)
fit("Rprop", lambda net: torch.optim.Rprop(net.parameters()), 6)
fit("lookahead", lambda net: Lookahead(net.parameters(), 3, lr=0.2), 9)
fit("ASGD", lambda net: torch.optim.ASGD([net[0].weight, net[2].weight], lr=0.1), 5)
fit("Adafactor", lambda net: torch.optim.Adafactor(net.parameters(), lr=0.05), 5)
