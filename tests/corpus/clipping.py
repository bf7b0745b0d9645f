# SPDX-License-Identifier: Apache-2.0
import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(20)


def experiment(clip):
    net = nn.Sequential(nn.Linear(3, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1))
    opt = torch.optim.SGD(net.parameters(), lr=0.05)
    out = []
    for step in range(8):
        x = torch.randn(21, 3) * 3
        y = (x**3).mean(1, keepdim=True)
        opt.zero_grad()
        loss = ((net(x) - y) ** 2).mean()
        loss.backward()
        if clip == "norm":
            before = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        elif clip == "inf":
            before = nn.utils.clip_grad_norm_(net.parameters(), 0.5, norm_type=float("inf"))
        elif clip == "value":
            nn.utils.clip_grad_value_(net.parameters(), clip_value=0.05)
            before = max(p.grad.abs().max() for p in net.parameters())
        else:  # adaptive, per unit
            for p in net.parameters():
                limit = 0.1 * p.detach().norm().clamp_min(1e-3)
                p.grad.mul_((limit / p.grad.norm().clamp_min(1e-6)).clamp(max=1.0))
            before = torch.stack([p.grad.norm() for p in net.parameters()]).norm()
        opt.step()
        out.append(f"{loss.item():.12g}/{before.item():.12g}")
    return out


for kind in "norm", "inf", "value", "adaptive":
    print(kind, *experiment(kind)[::3])
