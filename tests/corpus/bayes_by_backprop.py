# SPDX-License-Identifier: Apache-2.0
import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class BayesianLinear(nn.Module):
    """Weights are drawn in each call; the layer keeps the KL divergence of the call."""

    def __init__(self, n_in, n_out, prior_sigma=1.0):
        super().__init__()
        self.w_mu = nn.Parameter(torch.empty(n_out, n_in).uniform_(-0.2, 0.2))
        self.w_rho = nn.Parameter(torch.full((n_out, n_in), -4.0))
        self.b_mu = nn.Parameter(torch.zeros(n_out))
        self.b_rho = nn.Parameter(torch.full((n_out,), -4.0))
        self.prior_sigma = prior_sigma
        self.kl = 0

    def _kl(self, mu, sigma):
        return (
            math.log(self.prior_sigma) - torch.log(sigma) + (sigma**2 + mu**2) / (2 * self.prior_sigma**2) - 0.5
        ).sum()

    def forward(self, x):
        w_sigma, b_sigma = F.softplus(self.w_rho), F.softplus(self.b_rho)
        if self.training:
            w = self.w_mu + w_sigma * torch.randn_like(w_sigma)
            b = self.b_mu + b_sigma * torch.randn_like(b_sigma)
        else:
            w, b = self.w_mu, self.b_mu
        self.kl = self._kl(self.w_mu, w_sigma) + self._kl(self.b_mu, b_sigma)
        return F.linear(x, w, b)


class BayesianNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.l1 = BayesianLinear(1, 12)
        self.l2 = BayesianLinear(12, 1)

    def forward(self, x):
        return self.l2(torch.tanh(self.l1(x)))

    def kl(self):
        return self.l1.kl + self.l2.kl


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(101)
    x = torch.linspace(-2, 2, 51).unsqueeze(1)
    y = x.sin() + 0.1 * torch.randn_like(x)
    net = BayesianNet()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    batches = list(zip(x.split(10), y.split(10)))
    for epoch in range(4):
        nll_sum = kl_sum = 0.0
        for xb, yb in batches:
            pred = net(xb)
            nll = 0.5 * ((pred - yb) / 0.1).pow(2).sum()
            kl = net.kl() / len(batches)
            optimizer.zero_grad()
            (nll + kl).backward()
            optimizer.step()
            nll_sum += nll.item()
            kl_sum += kl.item()
        print(f"epoch {epoch} nll {nll_sum:.12g} kl {kl_sum:.12g}")
    net.train()
    with torch.no_grad():
        draws = torch.stack([net(x[::10]) for _ in range(5)])
    print("predictive std", [f"{s:.10g}" for s in draws.std(0).flatten().tolist()])
