# SPDX-License-Identifier: Apache-2.0
"""Largest eigenvalue of the Hessian by power iteration (Hessian-vector products), printed along the training."""
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

torch.set_default_dtype(torch.float64)
torch.manual_seed(92)
net = nn.Sequential(nn.Linear(3, 10), nn.Tanh(), nn.Linear(10, 1))
x = torch.randn(40, 3)
y = x.pow(2).sum(1, keepdim=True).sqrt()


def loss_of(rows):
    return nn.functional.mse_loss(net(x[rows]), y[rows])


def top_eigenvalue(rows, steps=4):
    params = list(net.parameters())
    grads = torch.autograd.grad(loss_of(rows), params, create_graph=True)
    flat = torch.cat([g.reshape(-1) for g in grads])
    v = torch.ones_like(flat) / flat.numel() ** 0.5
    for _ in range(steps):
        hv = torch.cat([h.reshape(-1) for h in torch.autograd.grad(flat @ v, params, retain_graph=True)])
        eigenvalue = (v @ hv).item()
        v = hv / hv.norm()
    return eigenvalue


velocity = torch.zeros_like(parameters_to_vector(net.parameters()))
for step in range(6):
    rows = torch.randperm(40)[:13]
    loss = loss_of(rows)
    grad = parameters_to_vector(torch.autograd.grad(loss, list(net.parameters())))
    velocity = 0.9 * velocity - 0.05 * grad
    vector_to_parameters(parameters_to_vector(net.parameters()) + velocity, net.parameters())
    print(step, loss.item(), top_eigenvalue(rows))
