# SPDX-License-Identifier: Apache-2.0
"""MAML on sinusoids; the inner loop runs the model with fast weights by torch.func.functional_call."""
import torch
from torch import nn
from torch.func import functional_call

torch.set_default_dtype(torch.float64)
torch.manual_seed(2)


def sample_task(k=5):
    amplitude, phase = torch.rand(()) * 4 + 1, torch.rand(()) * 3.14
    x = torch.rand(2 * k, 1) * 10 - 5
    y = amplitude * torch.sin(x - phase)
    return x[:k], y[:k], x[k:], y[k:]


model = nn.Sequential(nn.Linear(1, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 1))
meta_opt = torch.optim.Adam(model.parameters(), lr=1e-2)
loss_fn = nn.MSELoss()
for iteration in range(5):
    meta_loss = 0.0
    for _ in range(3):
        xs, ys, xq, yq = sample_task()
        params = dict(model.named_parameters())
        for _ in range(2):
            inner = loss_fn(functional_call(model, params, (xs,)), ys)
            grads = torch.autograd.grad(inner, list(params.values()), create_graph=True)
            params = {n: p - 0.01 * g for (n, p), g in zip(params.items(), grads)}
        meta_loss = meta_loss + loss_fn(functional_call(model, params, (xq,)), yq)
    meta_opt.zero_grad()
    meta_loss.backward()
    meta_opt.step()
    print(f"iteration {iteration} meta loss {meta_loss.item() / 3:.12g}")
