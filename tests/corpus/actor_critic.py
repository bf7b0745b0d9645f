# SPDX-License-Identifier: Apache-2.0
import math
from collections import namedtuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Normal

SavedAction = namedtuple("SavedAction", ["log_prob", "value"])
torch.manual_seed(13)
torch.set_default_dtype(torch.float64)


class Pendulum:
    """Several pendulums at once."""

    def __init__(self, n):
        self.n = n

    def reset(self):
        self.th, self.dth = torch.rand(self.n) * math.pi - math.pi / 2, torch.zeros(self.n)
        return self.obs()

    def obs(self):
        return torch.stack([self.th.cos(), self.th.sin(), self.dth], 1)

    def step(self, u):
        u = u.clamp(-2, 2)
        self.dth = (self.dth + (5 * self.th.sin() + 3 * u) * 0.05).clamp(-8, 8)
        self.th = self.th + self.dth * 0.05
        return self.obs(), -(self.th**2 + 0.1 * self.dth**2 + 0.001 * u**2)


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1 = nn.Linear(3, 24)
        self.mu = nn.Linear(24, 1)
        self.log_std = nn.Parameter(torch.zeros(1))
        self.value_head = nn.Linear(24, 1)

    def forward(self, x):
        x = torch.tanh(self.affine1(x))
        return Normal(self.mu(x).squeeze(1), self.log_std.exp()), self.value_head(x).squeeze(1)


env, model = Pendulum(5), ActorCritic()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for episode in range(3):
    state, saved, rewards = env.reset(), [], []
    for t in range(8):
        dist, value = model(state)
        action = dist.sample()
        saved.append(SavedAction(dist.log_prob(action), value))
        state, reward = env.step(action)
        rewards.append(reward)
    R, returns = torch.zeros(5), []
    for r in reversed(rewards):
        R = r + 0.95 * R
        returns.insert(0, R)
    returns = torch.stack(returns)
    log_probs = torch.stack([s.log_prob for s in saved])
    values = torch.stack([s.value for s in saved])
    advantage = returns - values.detach()
    loss = -(log_probs * advantage).mean() + F.smooth_l1_loss(values, returns) - 0.01 * dist.entropy().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"episode {episode} return {returns[0].mean().item():.12g} loss {loss.item():.12g} std {model.log_std.exp().item():.12g}")
