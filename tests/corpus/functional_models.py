# SPDX-License-Identifier: Apache-2.0
"""Models as functions of their weights: functional_call with other weights, stacked ensembles, grad and vmap, jvp."""
import torch
from torch import nn
from torch.func import functional_call, grad, grad_and_value, jvp, stack_module_state, vmap

torch.set_default_dtype(torch.float64)
torch.manual_seed(251)
model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
x = torch.randn(42, 3)
y = x[:, :1].exp() / 3
opt = torch.optim.SGD(model.parameters(), lr=0.1)


def step():
    rows = torch.randperm(42)[:11]
    loss = nn.functional.mse_loss(model(x[rows]), y[rows])
    opt.zero_grad()
    loss.backward()
    opt.step()
    return loss.item()


print([step() for _ in range(5)])
weights = dict(model.named_parameters())
zero = {name: torch.zeros_like(p) for name, p in weights.items()}
print(functional_call(model, zero, (x,)).abs().sum().item(), functional_call(model, {"2.bias": zero["2.bias"]}, (x,)).sum().item())
print([step() for _ in range(3)])


def loss_of(weights, a, b):
    return nn.functional.mse_loss(functional_call(model, weights, (a,)), b)


detached = {name: p.detach() for name, p in weights.items()}
grads, value = grad_and_value(loss_of)(detached, x, y)
print(value.item(), {name: g.norm().item() for name, g in grads.items()})
each = vmap(grad(loss_of), in_dims=(None, 0, 0))(detached, x[:, None], y[:, None])
print({name: g.flatten(1).norm(dim=1).max().item() for name, g in each.items()})
out, slope = jvp(lambda a: model(a).sum(1), (x,), (torch.ones_like(x),))
print(out.sum().item(), slope.sum().item())
print([step() for _ in range(3)])

models = [nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)) for _ in range(3)]
params, buffers = stack_module_state(models)
together = vmap(lambda p, b, a: functional_call(models[0], (p, b), (a,)), in_dims=(0, 0, None))
opt_all = torch.optim.Adam(params.values(), lr=0.05)
for _ in range(4):
    loss = (together(params, buffers, x) - y).square().mean((1, 2))
    opt_all.zero_grad()
    loss.sum().backward()
    opt_all.step()
    print(loss.tolist())
print([m(x).mean().item() for m in models])
meta = {name: p.clone() for name, p in weights.items()}
for _ in range(3):
    inner = torch.autograd.grad(loss_of(meta, x[:20], y[:20]), list(meta.values()), create_graph=True)
    meta = {name: p - 0.1 * g for (name, p), g in zip(meta.items(), inner)}
opt.zero_grad()
loss_of(meta, x[20:], y[20:]).backward()
print({name: p.grad.norm().item() for name, p in weights.items()})
