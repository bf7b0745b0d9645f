# SPDX-License-Identifier: Apache-2.0
"""Physics-informed network for u'' = -pi^2 sin(pi x) and the heat equation; second derivatives by autograd."""
import numpy as np
import torch
import torch.nn as nn

np.random.seed(0)
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)


class PINN(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.linears = nn.ModuleList([nn.Linear(a, b) for a, b in zip(layers[:-1], layers[1:])])
        self.activation = nn.Tanh()
        for lin in self.linears:
            nn.init.xavier_normal_(lin.weight.data, gain=1.0)
            nn.init.zeros_(lin.bias.data)

    def forward(self, x, t):
        a = torch.cat([x, t], dim=1)
        for lin in self.linears[:-1]:
            a = self.activation(lin(a))
        return self.linears[-1](a)


def gradients(u, x, order=1):
    for _ in range(order):
        u = torch.autograd.grad(u, x, grad_outputs=torch.ones_like(u), create_graph=True)[0]
    return u


net = PINN([2, 14, 14, 1])
optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
for it in range(10):
    x = torch.from_numpy(np.random.uniform(0, 1, (33, 1))).requires_grad_()
    t = torch.from_numpy(np.random.uniform(0, 0.2, (33, 1))).requires_grad_()
    u = net(x, t)
    residual = gradients(u, t) - 0.5 * gradients(u, x, 2)
    loss_pde = residual.pow(2).mean()
    x0 = torch.from_numpy(np.random.uniform(0, 1, (21, 1)))
    loss_ic = (net(x0, torch.zeros_like(x0)) - torch.sin(np.pi * x0)).pow(2).mean()
    tb = torch.from_numpy(np.random.uniform(0, 0.2, (11, 1)))
    loss_bc = net(torch.zeros_like(tb), tb).pow(2).mean() + net(torch.ones_like(tb), tb).pow(2).mean()
    loss = loss_pde + 10 * loss_ic + 10 * loss_bc
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if it % 3 == 0:
        print(f"It {it}: loss {loss.item():.12g} (pde {loss_pde.item():.12g}, ic {loss_ic.item():.12g}, bc {loss_bc.item():.12g})")
