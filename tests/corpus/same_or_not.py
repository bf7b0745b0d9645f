# SPDX-License-Identifier: Apache-2.0
"""Are two digits the same? One net looks at both; pairs are drawn when they are read."""
import random

import torch
from sklearn.datasets import load_digits
from torch import nn

random.seed(6)
torch.manual_seed(6)
torch.set_default_dtype(torch.float64)
digits, names = load_digits(return_X_y=True)
digits, names = torch.tensor(digits[:60] / 16).view(-1, 1, 8, 8), names[:60].tolist()


class Pairs(torch.utils.data.Dataset):
    def __len__(self):
        return len(names)

    def __getitem__(self, first):
        wants_same = random.random() < 0.5
        second = random.choice([one for one, name in enumerate(names) if (name == names[first]) == wants_same])
        return digits[first], digits[second], float(wants_same)


look = nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(216, 8))
optimizer = torch.optim.Adam(look.parameters(), lr=3e-3)
for epoch in range(2):
    for first, second, same in torch.utils.data.DataLoader(Pairs(), batch_size=17, shuffle=True):
        apart = (look(first) - look(second)).norm(dim=1)
        loss = (same * apart.square() + (1 - same) * (1.5 - apart).clamp(min=0).square()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(epoch, repr(loss.item()), repr(apart.mean().item()))
