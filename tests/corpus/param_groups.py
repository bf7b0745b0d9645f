# SPDX-License-Identifier: Apache-2.0
"""AdamW with three groups of parameters, each with a rate, a decay and a schedule of its own."""

import math

import torch
from torch import nn

STEPS, RISE = 24, 4


class Regressor(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.into = nn.Linear(7, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(3)
        )
        self.out = nn.Linear(width, 1)

    def forward(self, rows):
        state = self.into(rows)
        for layer in self.layers:
            state = state + layer(state)
        return self.out(state)[:, 0]


def rise_and_fall(step):
    if step < RISE:
        return (step + 1) / (RISE + 1)
    return math.cos(math.pi / 2 * (step - RISE) / (STEPS - RISE))


torch.set_default_dtype(torch.float64)
torch.manual_seed(13)
model = Regressor()
inner = list(model.layers.parameters())
ends = [*model.into.parameters(), *model.out.parameters()]
optimizer = torch.optim.AdamW(
    [
        {"params": [one for one in inner if one.dim() == 2], "lr": 1e-2, "weight_decay": 0.05},
        {"params": [one for one in inner if one.dim() == 1], "lr": 1e-2, "weight_decay": 0.0},
        {"params": ends, "lr": 3e-2},
    ]
)
paces = torch.optim.lr_scheduler.LambdaLR(optimizer, [rise_and_fall, lambda step: 1.0, rise_and_fall])
direction = torch.randn(7)
for step in range(STEPS):
    rows = torch.randn(19, 7)
    loss = nn.functional.smooth_l1_loss(model(rows), (rows @ direction).sin() + rows[:, 0])
    loss.backward()
    optimizer.step()
    paces.step()
    optimizer.zero_grad()
    if step % 6 == 0:
        print(step, repr(loss.item()), {len(group["params"]): group["lr"] for group in optimizer.param_groups})
