# SPDX-License-Identifier: Apache-2.0
import argparse
import random
from collections import deque
from itertools import count

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.distributions import Categorical

parser = argparse.ArgumentParser(description="REINFORCE on a corridor")
parser.add_argument("--gamma", type=float, default=0.97)
parser.add_argument("--seed", type=int, default=543)
parser.add_argument("--episodes", type=int, default=6)
args = parser.parse_args()


class Corridor:
    """Walk to the right end; the floor is slippery."""

    def __init__(self, length=5):
        self.length = length

    def reset(self):
        self.position, self.time = 0, 0
        return self._state()

    def _state(self):
        return [self.position / self.length, self.time / 20.0, float(self.position == 0)]

    def step(self, action):
        self.time += 1
        move = 1 if action == 1 else -1
        if random.random() < 0.2:
            move = -move
        self.position = max(0, self.position + move)
        done = self.position >= self.length or self.time >= 20
        return self._state(), (1.0 if self.position >= self.length else -0.05), done


random.seed(args.seed)
torch.manual_seed(args.seed)
torch.set_default_dtype(torch.float64)
env = Corridor()


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1 = nn.Linear(3, 16)
        self.dropout = nn.Dropout(p=0.3)
        self.affine2 = nn.Linear(16, 2)
        self.saved_log_probs = []
        self.rewards = []

    def forward(self, x):
        x = F.relu(self.dropout(self.affine1(x)))
        return F.softmax(self.affine2(x), dim=1)


policy = Policy()
optimizer = optim.Adam(policy.parameters(), lr=1e-2)
eps = 1e-8


def select_action(state):
    state = torch.tensor(state).unsqueeze(0)
    probs = policy(state)
    m = Categorical(probs)
    action = m.sample()
    policy.saved_log_probs.append(m.log_prob(action))
    return action.item()


def finish_episode():
    R = 0
    policy_loss = []
    returns = deque()
    for r in policy.rewards[::-1]:
        R = r + args.gamma * R
        returns.appendleft(R)
    returns = torch.tensor(list(returns))
    returns = (returns - returns.mean()) / (returns.std() + eps)
    for log_prob, R in zip(policy.saved_log_probs, returns):
        policy_loss.append(-log_prob * R)
    optimizer.zero_grad()
    policy_loss = torch.cat(policy_loss).sum()
    policy_loss.backward()
    optimizer.step()
    del policy.rewards[:]
    del policy.saved_log_probs[:]
    return policy_loss.item()


def main():
    running_reward = 0
    for i_episode in range(args.episodes):
        state, ep_reward = env.reset(), 0
        for t in count(1):
            action = select_action(state)
            state, reward, done = env.step(action)
            policy.rewards.append(reward)
            ep_reward += reward
            if done:
                break
        running_reward = 0.05 * ep_reward + (1 - 0.05) * running_reward
        loss = finish_episode()
        print(f"Episode {i_episode}\tLength: {t}\tLast reward: {ep_reward:.2f}\tAverage: {running_reward:.6f}\tLoss {loss:.12g}")


if __name__ == "__main__":
    main()
