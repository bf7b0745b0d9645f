# SPDX-License-Identifier: Apache-2.0
"""SGD by hand as old tutorials do it: through p.data and through arrays of numpy, which torch does not count."""
import torch
from torch import nn
from torch.nn import functional as F

torch.set_default_dtype(torch.float64)
torch.manual_seed(79)
model = nn.Sequential(nn.Linear(4, 14), nn.Sigmoid(), nn.Linear(14, 14), nn.Sigmoid(), nn.Linear(14, 1))
x = torch.randn(58, 4)
y = x.max(1, keepdim=True).values
lr = 0.3
velocity = [torch.zeros_like(p) for p in model.parameters()]


def batches():
    for rows in torch.randperm(58).split(12):
        loss = F.mse_loss(model(x[rows]), y[rows])
        model.zero_grad()
        loss.backward()
        yield loss.item()


for loss in batches():
    for p in model.parameters():
        p.data -= lr * p.grad
print("data", loss)
for loss in batches():
    for p, v in zip(model.parameters(), velocity):
        v.mul_(0.9).add_(p.grad)
        p.data.add_(v, alpha=-lr)
print("momentum", loss)
arrays = [p.detach().numpy() for p in model.parameters()]
for loss in batches():
    for array, p in zip(arrays, model.parameters()):
        array -= lr * p.grad.numpy()
print("numpy", loss)
for loss in batches():
    for p in model.parameters():
        p.data = p.data - lr * p.grad.data
print("other data", loss)
print("arrays are old now", float(arrays[0].sum()), model[0].weight.sum().item())
before = model[2].weight.data
for loss in batches():
    before -= lr * model[2].weight.grad  # an alias that was taken before the epoch
    model[4].weight.data.copy_(model[4].weight.data - lr * model[4].weight.grad)
    model[4].bias.data[0] -= lr * model[4].bias.grad[0].item()
    for p in model[0].parameters():
        p.detach().sub_(lr * p.grad)
print("aliases", loss)
with torch.no_grad():
    model[0].weight.numpy()[3, :] = 0
    print("a row is zero", F.mse_loss(model(x), y).item(), int((model[0].weight == 0).sum()))
