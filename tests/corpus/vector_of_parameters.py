# SPDX-License-Identifier: Apache-2.0
"""Evolution strategies and a line search: all weights as one vector, written back by vector_to_parameters."""
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

torch.set_default_dtype(torch.float64)
torch.manual_seed(83)
model = nn.Sequential(nn.Linear(3, 9), nn.Tanh(), nn.Linear(9, 2))
x = torch.randn(47, 3)
y = (x.sum(1) > 0).long()


def loss_at(vector):
    vector_to_parameters(vector, model.parameters())
    with torch.no_grad():
        return nn.functional.cross_entropy(model(x), y).item()


centre = parameters_to_vector(model.parameters()).detach().clone()
for generation in range(4):
    noise = torch.randn(6, len(centre))
    noise = torch.cat([noise, -noise])
    losses = torch.tensor([loss_at(centre + 0.1 * n) for n in noise])
    weights = (losses - losses.mean()) / losses.std()
    centre = centre - 0.05 * (weights @ noise)
    print("generation", generation, losses.min().item(), loss_at(centre))

# gradient steps with backtracking
vector_to_parameters(centre, model.parameters())
for step in range(4):
    loss = nn.functional.cross_entropy(model(x), y)
    grads = torch.autograd.grad(loss, list(model.parameters()))
    direction = -parameters_to_vector(grads)
    start, rate, tries = parameters_to_vector(model.parameters()).detach(), 8.0, 1
    while loss_at(start + rate * direction) > loss.item() - 0.3 * rate * direction.dot(direction).item():
        rate, tries = rate / 2, tries + 1
    print("step", step, loss.item(), "rate", rate, "after", tries)
half = parameters_to_vector(model.parameters()).detach() / 2
vector_to_parameters(half, model.parameters())
half.mul_(0)  # the parameters are views of it
print("nothing is left:", model(x).abs().sum().item())
