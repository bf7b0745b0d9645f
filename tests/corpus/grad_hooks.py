# SPDX-License-Identifier: Apache-2.0
"""Gradient noise and clamping by hooks of parameters; weight decay by hand; gradient norms recorded."""
from collections import OrderedDict

import torch

torch.set_default_dtype(torch.float64)
torch.manual_seed(48)
net = torch.nn.Sequential(
    OrderedDict([("a", torch.nn.Linear(4, 11)), ("relu", torch.nn.ReLU()), ("b", torch.nn.Linear(11, 1))])
)
seen = {}
for name, p in net.named_parameters():
    p.register_hook(lambda g: g.clamp(-0.5, 0.5))

    def note(g, name=name):
        seen.setdefault(name, []).append(g.norm().item())

    p.register_hook(note)
net.a.weight.register_hook(lambda g: g + 1e-3 * torch.randn_like(g))
lr, decay = 0.1, 1e-2
x = torch.randn(34, 4)
y = (x * torch.tensor([1.0, -2.0, 0.5, 0.0])).sum(1, keepdim=True).relu()
for epoch in range(3):
    for xb, yb in zip(x.split(7), y.split(7)):
        net.zero_grad()
        l2 = sum(p.pow(2).sum() for n, p in net.named_parameters() if "weight" in n)
        loss = (net(xb) - yb).abs().mean() + decay * l2
        loss.backward()
        with torch.no_grad():
            for p in net.parameters():
                p -= lr * p.grad
    print("epoch", epoch, loss.item(), l2.item())
for name, norms in seen.items():
    print(name, len(norms), norms[0], norms[-1])
