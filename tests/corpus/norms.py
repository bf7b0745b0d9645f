# SPDX-License-Identifier: Apache-2.0
import torch
from torch import nn


def conv_block(i, o, norm):
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), norm, nn.Mish(), nn.AvgPool2d(2))


def make(kind):
    norms = {
        "group": lambda c, s: nn.GroupNorm(2, c),
        "instance": lambda c, s: nn.InstanceNorm2d(c, affine=True),
        "instance_running": lambda c, s: nn.InstanceNorm2d(c, affine=True, track_running_stats=True),
        "layer": lambda c, s: nn.LayerNorm([c, s, s]),
        "local_response": lambda c, s: nn.LocalResponseNorm(2),
        "batch_momentum": lambda c, s: nn.BatchNorm2d(c, momentum=None),
    }[kind]
    return nn.Sequential(conv_block(1, 4, norms(4, 8)), conv_block(4, 6, norms(6, 4)), nn.Flatten(), nn.Linear(24, 2))


def run(kind, x, y):
    torch.manual_seed(0)
    net = make(kind)
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for start in range(0, len(x), 6):
        loss = nn.functional.cross_entropy(net(x[start : start + 6]), y[start : start + 6])
        opt.zero_grad()
        loss.backward()
        opt.step()
    net.eval()
    with torch.no_grad():
        return loss.item(), nn.functional.cross_entropy(net(x), y).item()


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(10)
    x = torch.randn(23, 1, 8, 8)
    y = (x.mean((1, 2, 3)) > 0).long()
    for kind in "group instance instance_running layer local_response batch_momentum".split():
        print("{:<18s} {:.12g} {:.12g}".format(kind, *run(kind, x, y)))
