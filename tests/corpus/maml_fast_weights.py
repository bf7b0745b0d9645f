# SPDX-License-Identifier: Apache-2.0
"""A net that runs on weights it is given, and a module whose forward trains it to learn from few examples."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

torch.set_default_dtype(torch.float64)
torch.manual_seed(222)


class Pupil(nn.Module):
    def __init__(self, kinds):
        super().__init__()
        start = torch.randn(4, 16) / 2, torch.zeros(16), torch.randn(16, kinds) / 4, torch.zeros(kinds)
        self.own = nn.ParameterList(map(nn.Parameter, start))

    def forward(self, points, weights=None):
        one, shift, two, offset = weights or self.own
        return (points @ one + shift).relu() @ two + offset


class Teacher(nn.Module):
    def __init__(self, pupil):
        super().__init__()
        self.pupil = pupil
        self.optimizer = torch.optim.Adam(pupil.parameters(), lr=5e-3)

    def after_lesson(self, points, kinds):
        weights = tuple(self.pupil.own)
        for _ in range(2):
            slopes = torch.autograd.grad(cross_entropy(self.pupil(points, weights), kinds), weights, create_graph=True)
            weights = tuple(torch.sub(weight, slope, alpha=0.1) for weight, slope in zip(weights, slopes))
        return weights

    def forward(self, shown, their_kinds, asked, right):
        answers = [
            self.pupil(questions, self.after_lesson(points, kinds))
            for points, kinds, questions in zip(shown, their_kinds, asked)
        ]
        answers = torch.stack(answers)
        loss = cross_entropy(answers.flatten(0, 1), right.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item(), (answers.argmax(2) == right).sum().item()


def lessons(number=3, kinds=3, shown=3, asked=5):
    middles = 2 * torch.randn(number, 1, kinds, 4)
    points = middles + torch.randn(number, shown + asked, kinds, 4)
    kind = torch.arange(kinds).repeat(number, shown + asked, 1)
    parts = points[:, :shown], kind[:, :shown], points[:, shown:], kind[:, shown:]
    return [part.flatten(1, 2) for part in parts]


teacher = Teacher(Pupil(3))
for term in range(5):
    loss, right = teacher(*lessons())
    print("term", term, "loss", repr(loss), "right", right, "of", 45)
