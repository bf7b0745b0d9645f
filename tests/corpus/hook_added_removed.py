# SPDX-License-Identifier: Apache-2.0
"""Forward hooks that change what a layer gives are registered in the middle of training, and removed again."""
import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(43)
net = nn.Sequential(nn.Linear(6, 18), nn.GELU(), nn.Linear(18, 18), nn.GELU(), nn.Linear(18, 2))
opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.5)
x = torch.randn(72, 6)
y = (x[:, ::2].sum(1) > 0).long()
direction = torch.randn(18)


def steer(strength):
    def hook(module, inputs, output):
        return output + strength * direction

    return hook


def half(module, inputs):
    return (inputs[0] * 0.5,)


def epoch(name):
    for rows in torch.randperm(72).split(14):
        loss = nn.functional.cross_entropy(net(x[rows]), y[rows])
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(name, loss.item())


epoch("plain")
handle = net[2].register_forward_hook(steer(0.7))
epoch("steered")
handle.remove()
epoch("plain again")
with net[0].register_forward_pre_hook(half):
    epoch("half of the input")
handles = [net[i].register_forward_hook(steer(0.1 * i)) for i in (0, 2)]
epoch("two hooks")
for h in handles:
    h.remove()
everywhere = nn.modules.module.register_module_forward_hook(
    lambda module, inputs, output: output * 1.1 if isinstance(module, nn.GELU) else None
)
epoch("a hook of all modules")
everywhere.remove()
backward = net[4].register_full_backward_hook(lambda module, gi, go: (gi[0] * 2,))
epoch("a backward hook")
backward.remove()
epoch("plain at last")
