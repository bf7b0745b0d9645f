# SPDX-License-Identifier: Apache-2.0
"""A policy learns to leave a slippery corridor: one state at a time, then one update per walk."""
import random

import torch
from torch import nn

random.seed(3)
torch.manual_seed(3)
torch.set_default_dtype(torch.float64)
policy = nn.Sequential(nn.Linear(2, 10), nn.Tanh(), nn.Linear(10, 2))
optimizer = torch.optim.Adam(policy.parameters(), lr=0.03)
for walk in range(6):
    place, chances, rewards = 0, [], []
    while place < 4 and len(rewards) < 15:
        scores = policy(torch.tensor([[place / 4, len(rewards) / 15]]))
        choice = torch.distributions.Categorical(logits=scores[0])
        forward = choice.sample()
        chances.append(choice.log_prob(forward))
        place = max(0, place + (1 if bool(forward) == (random.random() > 0.15) else -1))
        rewards.append(1.0 if place == 4 else -0.1)
    worth, total = [], 0.0
    for reward in reversed(rewards):
        total = reward + 0.95 * total
        worth.insert(0, total)
    loss = -(torch.stack(chances) * torch.tensor(worth)).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("walk", walk, "steps", len(rewards), "place", place, "loss", repr(loss.item()))
