# SPDX-License-Identifier: Apache-2.0
"""torch.autograd.grad of chosen tensors, backward(inputs=...), gradients of the input that are used in the loss."""
import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(127)
model = nn.Sequential(nn.Linear(4, 12), nn.Softplus(), nn.Linear(12, 12), nn.Softplus(), nn.Linear(12, 2))
x = torch.randn(41, 4)
y = torch.stack([x.sum(1).sin(), x[:, 0] * x[:, 1]], 1)

loss = nn.functional.mse_loss(model(x), y)
(only,) = torch.autograd.grad(loss, model[2].weight, retain_graph=True)
some = torch.autograd.grad(loss, [model[0].bias, model[4].weight])
print("chosen", only.norm().item(), [g.norm().item() for g in some], model[0].weight.grad)

loss = nn.functional.mse_loss(model(x), y)
loss.backward(inputs=[model[4].weight, model[4].bias])
print("inputs", [n for n, p in model.named_parameters() if p.grad is not None], model[4].weight.grad.norm().item())
unused = nn.Parameter(torch.ones(2))
loss = nn.functional.mse_loss(model(x), y)
print("unused", [g is None for g in torch.autograd.grad(loss, [unused, model[0].weight], allow_unused=True)])

points = x.clone().requires_grad_()
out = model(points)
weights = torch.randn_like(out)
(gx,) = torch.autograd.grad(out, points, grad_outputs=weights)
print("vector-Jacobian", gx.shape, gx.sum().item(), gx[-1].tolist())
rows = [torch.autograd.grad(model(p[None])[0, 1], p)[0] for p in points.detach().requires_grad_().unbind()[:0]]
rows += [torch.autograd.grad(model(p.detach().requires_grad_()[None]).sum(), model[0].bias)[0].norm().item() for p in x[:3]]
print("one row each", rows)

# energy and forces: the loss contains a derivative by the input
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for step in range(9):
    points = x[torch.randperm(41)[:14]].requires_grad_()
    energy = model(points)[:, :1]
    (force,) = torch.autograd.grad(energy.sum(), points, create_graph=True)
    loss = (energy - points.norm(dim=1, keepdim=True)).square().mean() + (force.norm(dim=1) - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item(), points.grad.norm().item())
# a penalty on the gradient by the weights
for step in range(4):
    loss = nn.functional.mse_loss(model(x), y)
    grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    penalty = sum(g.square().sum() for g in grads)
    optimizer.zero_grad()
    (loss + 0.01 * penalty).backward()
    optimizer.step()
    print(step, loss.item(), penalty.item())
