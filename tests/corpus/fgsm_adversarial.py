# SPDX-License-Identifier: Apache-2.0
"""Digits are changed a little, so that the net is wrong; it learns from them, and is tested with them one by one."""
import torch
from sklearn.datasets import load_digits
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(33)
pixels, digits = (torch.from_numpy(part[:84]) for part in load_digits(n_class=5, return_X_y=True))
pixels = pixels / 16
reader = nn.Sequential(nn.Linear(64, 32), nn.Softplus(), nn.Linear(32, 5))
wrong = nn.CrossEntropyLoss()


def misleading(given, answer, most, rounds):
    """Return the digits after some steps uphill, none of whose pixels has changed by more than ``most``."""
    lowest, highest = given - most, given + most
    changed = given + most * (2 * torch.rand_like(given) - 1)
    for _ in range(rounds):
        changed.requires_grad_()
        uphill = torch.autograd.grad(wrong(reader(changed), answer), changed)[0]
        changed = torch.clamp(changed.detach() + 0.4 * most * uphill.sign(), lowest, highest)
    return changed


optimizer = torch.optim.SGD(reader.parameters(), lr=0.2, momentum=0.9)
for epoch in range(2):
    for given, answer in zip(pixels[:60].split(13), digits[:60].split(13)):
        changed = misleading(given, answer, 0.1, 3)
        loss = (wrong(reader(given), answer) + wrong(reader(changed), answer)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("epoch", epoch, "loss", loss.item())

for most in (0.0, 0.1, 0.3):
    held, slopes = 0, 0.0
    for number in range(60, 84):
        given, answer = pixels[number : number + 1].clone().requires_grad_(), digits[number : number + 1]
        reader.zero_grad()
        wrong(reader(given), answer).backward()
        slopes += given.grad.norm().item()
        changed = (given + most * given.grad.sign()).detach().clamp(0, 1)
        held += int(reader(changed).argmax() == answer)
    print(f"pixels changed by {most}: {held} of 24 read, slopes {slopes:.12g}")
