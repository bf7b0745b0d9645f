# SPDX-License-Identifier: Apache-2.0
"""Jacobians and Hessians by torch.autograd.functional, contractive autoencoder, products with vectors."""
import torch
from torch import nn
from torch.autograd.functional import hessian, jacobian, jvp, vjp

torch.set_default_dtype(torch.float64)
torch.manual_seed(26)
encoder = nn.Sequential(nn.Linear(5, 4), nn.Sigmoid())
decoder = nn.Linear(4, 5)
opt = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=0.01)
x = torch.randn(8, 5)
for step in range(4):
    j = jacobian(encoder, x, create_graph=True)
    contraction = j.pow(2).sum() / len(x)
    loss = nn.functional.mse_loss(decoder(encoder(x)), x) + 0.01 * contraction
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(step, loss.item(), contraction.item())
print("hessian", hessian(lambda v: encoder(v).sum(), x[:3]).abs().sum().item())
v = torch.ones_like(x)
print("jvp", jvp(encoder, x, v)[1].sum().item(), "vjp", vjp(encoder, x, torch.ones(8, 4))[1].sum().item())
