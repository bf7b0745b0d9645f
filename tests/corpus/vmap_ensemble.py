# SPDX-License-Identifier: Apache-2.0
"""An ensemble whose members run at once by torch.func, and per-sample gradients for DP-SGD."""
import copy

import torch
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap

torch.set_default_dtype(torch.float64)
torch.manual_seed(66)


def member():
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


models = [member() for _ in range(3)]
params, buffers = stack_module_state(models)
base = copy.deepcopy(models[0]).to("meta")


def call(p, b, x):
    return functional_call(base, (p, b), (x,))


opt = torch.optim.SGD(params.values(), lr=0.1)
x = torch.randn(35, 3)
y = x.sin().sum(1, keepdim=True)
for step in range(6):
    out = vmap(call, in_dims=(0, 0, None))(params, buffers, x)
    loss = (out - y).pow(2).mean(dim=(1, 2))
    opt.zero_grad()
    loss.sum().backward()
    opt.step()
print("members", loss.tolist())

net = member()
weights = {k: v.detach() for k, v in net.named_parameters()}


def loss_of_one(p, xi, yi):
    return (functional_call(net, p, (xi.unsqueeze(0),)) - yi.unsqueeze(0)).pow(2).mean()


per_sample = vmap(grad(loss_of_one), in_dims=(None, 0, 0))
for step in range(4):
    g = per_sample(weights, x, y)
    norms = torch.stack([v.flatten(1).norm(dim=1) for v in g.values()]).norm(dim=0)
    scale = (1.0 / norms.clamp_min(1.0))
    for k in weights:
        clipped = (g[k] * scale.view(-1, *[1] * (g[k].dim() - 1))).sum(0)
        weights[k] = weights[k] - 0.1 * (clipped + 0.01 * torch.randn_like(clipped)) / len(x)
net.load_state_dict(weights)
print("private", (net(x) - y).pow(2).mean().item(), "clipped", (norms > 1).sum().item())
