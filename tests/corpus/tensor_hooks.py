# SPDX-License-Identifier: Apache-2.0
"""Hooks on outputs, retain_grad(), hooks on parameters after accumulation that step and free each gradient."""
import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(137)
model = nn.Sequential(nn.Linear(3, 9), nn.ReLU(), nn.Linear(9, 9), nn.ReLU(), nn.Linear(9, 1))
x = torch.randn(45, 3)
y = x.norm(dim=1, keepdim=True)
seen = []
for step, rows in enumerate(torch.randperm(45).split(10)):
    out = model(x[rows])
    out.register_hook(lambda g: g.clamp(-0.05, 0.05))
    out.register_hook(lambda g: seen.append((tuple(g.shape), g.abs().sum().item())))
    out.retain_grad()
    loss = nn.functional.mse_loss(out, y[rows])
    model.zero_grad()
    loss.backward()
    print(step, loss.item(), out.grad.sum().item(), model[0].weight.grad.norm().item())
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.5 * p.grad
print(seen)

# one optimizer per parameter, stepped within backward()
optimizers = {p: torch.optim.Adam([p], lr=0.02) for p in model.parameters()}
order = []


def step_and_free(p):
    order.append((tuple(p.shape), p.grad.norm().item()))
    optimizers[p].step()
    optimizers[p].zero_grad()


handles = [p.register_post_accumulate_grad_hook(step_and_free) for p in model.parameters()]
for rows in torch.randperm(45).split(10):
    loss = nn.functional.mse_loss(model(x[rows]), y[rows])
    loss.backward()
    print(loss.item(), [p.grad for p in model.parameters()] == [None] * 6)
print(len(order), sorted(order[-6:]))
for handle in handles:
    handle.remove()

# hooks of parameters that scale and drop, removed in the middle; hooks on what goes in
handle = model[2].weight.register_hook(lambda g: 0 * g)
given = x.clone().requires_grad_()
given.register_hook(lambda g: print("input", tuple(g.shape), g.norm().item()))
model(given).sum().backward()
print(model[2].weight.grad.norm().item(), given.grad.norm().item())
handle.remove()
model(given).sum().backward()
print(model[2].weight.grad.norm().item(), given.grad.norm().item())
