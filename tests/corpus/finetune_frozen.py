# SPDX-License-Identifier: Apache-2.0
"""Learns three tones, saves that; then two tones with what it knows: the head alone first, later a layer more."""
import torch
from torch import nn
from torch.nn.functional import cross_entropy

torch.set_default_dtype(torch.float64)
torch.manual_seed(21)


class Ear(nn.Module):
    def __init__(self, tones):
        super().__init__()
        self.near = nn.Sequential(nn.Conv1d(1, 4, 3, padding=1), nn.BatchNorm1d(4), nn.ReLU())
        self.far = nn.Sequential(nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6), nn.ReLU())
        self.name = nn.Linear(6, tones)

    def forward(self, sound):
        return self.name(self.far(self.near(sound)).mean(2))


def sounds(number, tones):
    tone = torch.arange(number) % tones
    clean = torch.outer(1.0 + tone, torch.linspace(0, 6.28, 16)).sin()
    return torch.normal(clean, 0.3)[:, None], tone


def lesson(ear, optimizer, sound, tone, size):
    order = torch.randperm(len(tone))
    for which in order.split(size):
        loss = cross_entropy(ear(sound[which]), tone[which])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


first = Ear(3)
print("three tones:", lesson(first, torch.optim.SGD(first.parameters(), lr=0.1), *sounds(60, 3), 16))
torch.save(first.state_dict(), "three_tones.pt")

ear = Ear(3)
ear.load_state_dict(torch.load("three_tones.pt"))
ear.requires_grad_(False)
ear.name = nn.Linear(6, 2)
print("learns at first:", *[name for name, weight in ear.named_parameters() if weight.requires_grad])
optimizer = torch.optim.SGD(ear.name.parameters(), lr=0.05, momentum=0.9)
slower = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
heard, unheard = sounds(51, 2), sounds(20, 2)
for epoch in range(4):
    if epoch == 2:
        ear.far[0].requires_grad_(True)
        optimizer.add_param_group({"params": ear.far[0].parameters(), "lr": 0.005})
        slower = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        print("learns from now on:", *[name for name, weight in ear.named_parameters() if weight.requires_grad])
    ear.train()
    for known in (ear.near, ear.far):
        known.eval()  # its statistics are those of the three tones
    loss = lesson(ear, optimizer, *heard, 10)
    slower.step()
    with torch.no_grad():
        scores = ear.eval()(unheard[0])
    right = (scores.argmax(1) == unheard[1]).sum().item()
    print(epoch, loss, "unheard", cross_entropy(scores, unheard[1]).item(), right, "of 20", slower.get_last_lr())
