# SPDX-License-Identifier: Apache-2.0
"""torch.func runs three nets as one, and gives the gradient of each sample, which is cut short and made noisy."""

import torch
from torch import func, nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(66)
points = torch.randn(35, 3)
heights = points.sin().sum(1, keepdim=True)


def small_net(device="cpu"):
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)


shape_only = small_net("meta")
weights, _ = func.stack_module_state([small_net(), small_net(), small_net()])
all_three = func.vmap(lambda one: func.functional_call(shape_only, one, (points,)))
optimizer = torch.optim.SGD(weights.values(), lr=0.1)
for _ in range(6):
    errors = (all_three(weights) - heights).square().flatten(1).mean(1)
    optimizer.zero_grad()
    errors.sum().backward()
    optimizer.step()
print("three nets", errors.tolist())

secret = small_net()
weights = {name: weight.detach().clone() for name, weight in secret.named_parameters()}


def error_of_one(weights, point, height):
    return (func.functional_call(secret, weights, (point[None],))[0] - height).square().sum()


slopes_of_each = func.vmap(func.grad(error_of_one), (None, 0, 0))
for _ in range(4):
    slopes = slopes_of_each(weights, points, heights)
    lengths = torch.cat([slope.flatten(1) for slope in slopes.values()], dim=1).norm(dim=1)
    shorter = 1 / lengths.clamp(min=1)
    for name, slope in slopes.items():
        noisy = torch.einsum("n,n...->...", shorter, slope) + 0.01 * torch.randn_like(weights[name])
        weights[name] = weights[name] - 0.1 / 35 * noisy
secret.load_state_dict(weights)
print("secret", (secret(points) - heights).square().mean().item(), "cut short", int((lengths > 1).sum()))
