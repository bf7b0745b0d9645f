# SPDX-License-Identifier: Apache-2.0
"""Trains on two digits at once, laid over one another or with a patch of one in the other, by numpy's numbers."""

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn


def laid_over(pictures, others):
    share = np.random.beta(0.4, 0.4)
    return torch.lerp(others, pictures, share), share


def patched(pictures, others):
    top, bottom = sorted(np.random.randint(0, 9, 2))
    left, right = sorted(np.random.randint(0, 9, 2))
    inside = torch.zeros(8, 8, dtype=torch.bool)
    inside[top:bottom, left:right] = True
    return torch.where(inside, others, pictures), 1 - inside.double().mean().item()


torch.set_default_dtype(torch.float64)
np.random.seed(16)
torch.manual_seed(16)
pictures, digits = (torch.tensor(part[:90]) for part in load_digits(return_X_y=True))
pictures = pictures.view(90, 1, 8, 8) / 16
loader = torch.utils.data.DataLoader(list(zip(pictures, digits)), batch_size=16, shuffle=True)
net = nn.Sequential(
    nn.Conv2d(1, 4, 3, padding=1, bias=False),
    nn.BatchNorm2d(4),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(64, 10),
)
cost = nn.CrossEntropyLoss(label_smoothing=0.1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
for epoch in range(2):
    net.train()
    losses, right = [], 0.0
    for picture, digit in loader:
        partner = torch.randperm(len(digit))
        mix = laid_over if np.random.rand() < 0.5 else patched
        mixed, share = mix(picture, picture[partner])
        scores = net(mixed)
        loss = share * cost(scores, digit) + (1 - share) * cost(scores, digit[partner])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        found = scores.argmax(1)
        right += (share * (found == digit) + (1 - share) * (found == digit[partner])).sum().item()
    net.eval()
    with torch.no_grad():
        unmixed = cost(net(pictures), digits).item()
    print(f"{epoch}: mixed {np.mean(losses):.12f}, right {right:.9f}, unmixed {unmixed:.12f}")
