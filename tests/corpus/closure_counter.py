# SPDX-License-Identifier: Apache-2.0
"""Activations made by a function: their slope falls with a count in its closure, which the loop advances."""
import torch
import torch.nn as nn


def annealed(start):
    count = 0
    history = [start]

    def activation(x):
        return torch.where(x > 0, x, x * start / (1 + count))

    def advance():
        nonlocal count
        count += 1
        history.append(start / (1 + count))

    return activation, advance, history


class Lambda(nn.Module):
    def __init__(self, f):
        super().__init__()
        self.f = f

    def forward(self, x):
        return self.f(x)


torch.set_default_dtype(torch.float64)
torch.manual_seed(11)
act, advance, history = annealed(0.8)
net = nn.Sequential(nn.Linear(3, 16), Lambda(act), nn.Linear(16, 16), Lambda(act), nn.Linear(16, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
x = torch.randn(70, 3)
y = x.prod(1, keepdim=True)
for epoch in range(3):
    for step, (xb, yb) in enumerate(zip(x.split(11), y.split(11))):
        loss = nn.functional.mse_loss(net(xb), yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 3 == 1:
            advance()
    print(f"epoch {epoch} slope {history[-1]:.6f} loss {loss.item():.15g}")
print(len(history), [p.norm().item() for p in net.parameters()])
