# SPDX-License-Identifier: Apache-2.0
"""Variational layers that return the KL divergence beside the output, as an argument of the ELBO."""
import torch
from torch import nn
from torch.distributions import Normal, kl_divergence


class VariationalLinear(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.mu = nn.Parameter(0.1 * torch.randn(o, i))
        self.log_sigma = nn.Parameter(torch.full((o, i), -3.0))
        self.bias = nn.Parameter(torch.zeros(o))

    def forward(self, x):
        q = Normal(self.mu, self.log_sigma.exp())
        # local reparameterisation: noise per sample
        mean = x @ self.mu.T + self.bias
        std = (x.pow(2) @ q.variance.T).clamp_min(1e-12).sqrt()
        kl = kl_divergence(q, Normal(torch.zeros_like(self.mu), torch.ones_like(self.mu))).sum()
        return mean + std * torch.randn_like(mean), kl


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = VariationalLinear(4, 10)
        self.b = VariationalLinear(10, 2)

    def forward(self, x):
        h, kl1 = self.a(x)
        out, kl2 = self.b(torch.relu(h))
        return out, kl1 + kl2


torch.set_default_dtype(torch.float64)
torch.manual_seed(95)
x = torch.randn(62, 4)
y = (x[:, 0] > x[:, 1]).long()
net = Net()
opt = torch.optim.Adam(net.parameters(), lr=0.02)
for epoch in range(4):
    for rows in torch.randperm(62).split(13):
        out, kl = net(x[rows])
        loss = nn.functional.cross_entropy(out, y[rows]) + kl / len(x)
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(f"epoch {epoch} elbo {-loss.item():.12g} kl {kl.item():.12g}")
