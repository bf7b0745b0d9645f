# SPDX-License-Identifier: Apache-2.0
"""Letters that are changed whenever they are read, by numbers from Python, NumPy and torch."""
import random

import numpy as np
import torch
from torch import nn

random.seed(2024)
np.random.seed(2025)
torch.manual_seed(2026)
torch.set_default_dtype(torch.float64)


def mirrored(picture):
    return np.fliplr(picture) if random.random() < 0.5 else picture


def moved(picture):
    return np.roll(picture, np.random.randint(-1, 2), axis=0)


def as_tensor(picture):
    return torch.tensor(picture.copy()).unsqueeze(0)


def grainy(picture):
    return torch.normal(picture, 0.1)


class Letters(torch.utils.data.Dataset):
    glyphs = {"T": "111 010 010", "L": "100 100 111", "I": "010 010 010"}

    def __init__(self, text, *changes):
        self.text, self.changes = text, changes

    def __len__(self):
        return len(self.text)

    def __getitem__(self, which):
        letter = self.text[which]
        picture = np.pad([[float(dot) for dot in line] for line in self.glyphs[letter].split()], 2)
        for change in self.changes:
            picture = change(picture)
        return picture, list(self.glyphs).index(letter)


letters = Letters(random.choices("TLI", k=50), mirrored, moved, as_tensor, grainy)
net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(36, 3))
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
for epoch in range(3):
    read, missed = 0, 0.0
    for pictures, kinds in torch.utils.data.DataLoader(letters, batch_size=9, shuffle=True):
        scores = net(pictures)
        loss = nn.functional.cross_entropy(scores, kinds)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        read += int((scores.argmax(1) == kinds).sum())
        missed += loss.item() * len(kinds)
    print("epoch", epoch, "letters read", read, "of", len(letters), "loss", repr(missed / len(letters)))
