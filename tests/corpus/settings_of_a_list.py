# SPDX-License-Identifier: Apache-2.0
"""Scales live on plain objects in a list of a submodule; a schedule changes them between steps."""
from dataclasses import dataclass

import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(29)


@dataclass
class Stage:
    name: str
    scale: float
    skip: bool = False


class Steps(nn.Module):
    def __init__(self, width, stages):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in stages)
        self.stages = stages

    def forward(self, x):
        for layer, stage in zip(self.layers, self.stages):
            if not stage.skip:
                x = x + stage.scale * layer(x).tanh()
        return x


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.steps = Steps(6, [Stage("low", 1.0), Stage("mid", 0.0), Stage("high", 0.0, skip=True)])
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        return self.head(self.steps(x))


def schedule(model, step):
    stages = {stage.name: stage for stage in model.steps.stages}
    stages["mid"].scale = min(1.0, step / 12)
    if step == 10:
        stages["high"].skip, stages["high"].scale = False, 0.25
    if step == 15:
        model.steps.stages.reverse()
    if step == 18:
        model.steps.stages.pop()


model = Model()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(44, 6)
y = (x[:, 0] > x[:, 3]).long()
for step in range(21):
    schedule(model, step)
    rows = torch.randperm(44)[:17]
    loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
    for p in model.parameters():
        p.grad = None
    loss.backward()
    opt.step()
    print(step, [f"{s.name} {s.scale:.3f}" for s in model.steps.stages if not s.skip], loss.item())
