# SPDX-License-Identifier: Apache-2.0
"""Tensors that forward() reads and no module holds: globals, plain attributes, a weight of the script, buffers set by hand."""
import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(211)
PRIOR = torch.zeros(3)
TABLES = {"bias": torch.zeros(3), "list": [torch.ones(10), torch.ones(10)]}
temperature = nn.Parameter(torch.tensor(1.5))  # trained, but in no module


def make(width):
    outside = torch.randn(width, 3).mul_(0.1).requires_grad_()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, width)
            self.plain = torch.ones(width)
            self.register_buffer("shift", torch.zeros(width))
            self.register_buffer("hidden", torch.ones(1), persistent=False)

        def forward(self, x):
            h = (self.a(x) + self.shift).tanh() * self.plain * self.hidden
            for factor in TABLES["list"]:
                h = h * factor
            return (h @ outside + PRIOR + TABLES["bias"]) / temperature

    return Net(), outside


net, outside = make(10)
params = [*net.parameters(), outside, temperature]
opt = torch.optim.SGD(params, lr=0.3)
x = torch.randn(45, 4)
y = x[:, :3].argmax(1)


def steps(name, number=3):
    for rows in torch.randperm(45).split(10)[:number]:
        loss = nn.functional.cross_entropy(net(x[rows]), y[rows])
        opt.zero_grad()
        loss.backward()
        opt.step()
    norms = [None if p.grad is None else p.grad.norm().item() for p in (outside, temperature)]
    print(f"{name}: {loss.item()!r} {temperature.item()!r} {norms}")


steps("at first", 5)
PRIOR.add_(torch.tensor([0.5, 0.0, -0.5]))
steps("global in place")
PRIOR = PRIOR * 2
steps("global replaced")
PRIOR.data[1] = 1.0
steps("global through data")
TABLES["bias"] -= 0.5
steps("in a dictionary")
TABLES["list"][1][3:6] = 0
steps("slice in a list")
TABLES["list"][0] = torch.full((10,), 0.8)
steps("item of a list")
net.plain.numpy()[:5] = 2.0
steps("attribute through numpy")
net.plain = net.plain.roll(2)
steps("attribute replaced")
net.shift.fill_(0.2)
steps("buffer in place")
net.shift = torch.linspace(-1, 1, 10)
steps("buffer replaced")
net.hidden *= 1.5
steps("buffer that is not saved")
outside.requires_grad_(False)
temperature.requires_grad_(False)
steps("frozen")
outside.requires_grad_(True)
net.a.weight.requires_grad_(False)
steps("another is frozen")
TABLES["list"].append(torch.rand(10))
steps("list grows")
net.plain.resize_(10).copy_(torch.arange(10) / 10)
steps("resized")
torch.save({"state": net.state_dict(), "outside": outside}, "all.pt")
