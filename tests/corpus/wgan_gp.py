# SPDX-License-Identifier: Apache-2.0
"""A net learns to place points on the corners of a square; its judge must not be steep: second derivatives."""

import itertools

import torch
from torch import nn

torch.manual_seed(4)
torch.set_default_dtype(torch.float64)
NUMBER = 17


def corners():
    while True:
        yield torch.randint(0, 2, (NUMBER, 2)) * 2.0 - 1 + 0.05 * torch.randn(NUMBER, 2)


class Judge(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.last = nn.Linear(2, 12), nn.Linear(12, 12), nn.Linear(12, 1)

    def forward(self, points):
        return self.last(self.two(self.one(points).tanh()).tanh())[:, 0]

    def steepness(self, true, made):
        """How far the slope is from one, at random places between true and made points."""
        between = torch.lerp(made, true, torch.rand(NUMBER, 1)).requires_grad_()
        (slope,) = torch.autograd.grad(self(between).sum(), between, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean()


judge = Judge()
maker = nn.Sequential(nn.Linear(2, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 2))
judge_step = torch.optim.Adam(judge.parameters(), lr=1e-3, betas=(0.5, 0.9))
maker_step = torch.optim.Adam(maker.parameters(), lr=1e-3, betas=(0.5, 0.9))
true_points = corners()
for turn in range(5):
    judge.requires_grad_(True)
    for true in itertools.islice(true_points, 3):
        with torch.no_grad():
            made = maker(torch.randn(NUMBER, 2))
        judge.zero_grad()
        steep = judge.steepness(true, made)
        told_apart = judge(true).mean() - judge(made).mean()
        (0.1 * steep - told_apart).backward()
        judge_step.step()
    judge.requires_grad_(False)
    maker.zero_grad()
    doubt = -judge(maker(torch.randn(NUMBER, 2))).mean()
    doubt.backward()
    maker_step.step()
    print(turn, "told apart", repr(told_apart.item()), "steep", repr(steep.item()), "doubt", repr(doubt.item()))
