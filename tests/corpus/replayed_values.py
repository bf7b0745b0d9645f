# SPDX-License-Identifier: Apache-2.0
"""Values of actions are learnt from remembered moves, with a second net that follows slowly."""
import copy
import random

import torch
from torch import nn

random.seed(8)
torch.manual_seed(8)
torch.set_default_dtype(torch.float64)
worth = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 2))
slow = copy.deepcopy(worth)
optimizer = torch.optim.Adam(worth.parameters(), lr=2e-2)
remembered = []
state = [0.0, 0.0, 1.0]
for move in range(40):
    with torch.no_grad():
        action = random.randrange(2) if random.random() < 0.4 else int(worth(torch.tensor([state])).argmax())
    after = [state[0] + (0.3 if action else -0.2), 0.8 * state[1] + random.gauss(0, 0.1), 1.0]
    remembered.append((state, action, 1.0 - abs(after[0] - 0.5), after))
    state = [0.0, 0.0, 1.0] if abs(after[0]) > 2 else after
    if move < 12:
        continue
    states, actions, rewards, nexts = zip(*random.sample(remembered, 11))
    with torch.no_grad():
        target = torch.tensor(rewards) + 0.9 * slow(torch.tensor(nexts)).max(1).values
    chosen = worth(torch.tensor(states)).gather(1, torch.tensor(actions)[:, None])[:, 0]
    loss = nn.functional.huber_loss(chosen, target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for mine, its in zip(worth.parameters(), slow.parameters()):
            its.lerp_(mine, 0.05)
    if move % 4 == 0:
        print("move", move, "loss", repr(loss.item()), "position", repr(state[0]))
