# SPDX-License-Identifier: Apache-2.0
"""DQN with replay buffer and target network on a grid world."""
import math
import random
from collections import deque, namedtuple

import torch
import torch.nn as nn
import torch.optim as optim

Transition = namedtuple("Transition", ("state", "action", "next_state", "reward"))
BATCH_SIZE, GAMMA, EPS_START, EPS_END, EPS_DECAY, TAU, LR = 16, 0.95, 0.9, 0.05, 60, 0.05, 1e-2
random.seed(5)
torch.manual_seed(5)
torch.set_default_dtype(torch.float64)


class Grid:
    moves = [(0, 1), (1, 0), (0, -1), (-1, 0)]

    def reset(self):
        self.p = (0, 0)
        return self.p

    def step(self, a):
        dx, dy = self.moves[a]
        self.p = (min(3, max(0, self.p[0] + dx)), min(3, max(0, self.p[1] + dy)))
        done = self.p == (3, 3)
        return self.p, 1.0 if done else -0.02, done


class ReplayMemory(object):
    def __init__(self, capacity):
        self.memory = deque([], maxlen=capacity)

    def push(self, *args):
        self.memory.append(Transition(*args))

    def sample(self, batch_size):
        return random.sample(self.memory, batch_size)

    def __len__(self):
        return len(self.memory)


class DQN(nn.Module):
    def __init__(self, n_observations, n_actions):
        super().__init__()
        self.layer1 = nn.Linear(n_observations, 24)
        self.layer2 = nn.Linear(24, n_actions)

    def forward(self, x):
        return self.layer2(torch.relu(self.layer1(x)))


policy_net, target_net = DQN(2, 4), DQN(2, 4)
target_net.load_state_dict(policy_net.state_dict())
optimizer = optim.AdamW(policy_net.parameters(), lr=LR, amsgrad=True)
memory = ReplayMemory(100)
steps_done = 0


def select_action(state):
    global steps_done
    eps_threshold = EPS_END + (EPS_START - EPS_END) * math.exp(-1.0 * steps_done / EPS_DECAY)
    steps_done += 1
    if random.random() > eps_threshold:
        with torch.no_grad():
            return policy_net(state).max(1).indices.view(1, 1)
    return torch.tensor([[random.randrange(4)]], dtype=torch.long)


def optimize_model():
    if len(memory) < BATCH_SIZE:
        return None
    batch = Transition(*zip(*memory.sample(BATCH_SIZE)))
    non_final_mask = torch.tensor([s is not None for s in batch.next_state], dtype=torch.bool)
    non_final_next_states = torch.cat([s for s in batch.next_state if s is not None])
    state_batch, action_batch, reward_batch = torch.cat(batch.state), torch.cat(batch.action), torch.cat(batch.reward)
    state_action_values = policy_net(state_batch).gather(1, action_batch)
    next_state_values = torch.zeros(BATCH_SIZE)
    with torch.no_grad():
        next_state_values[non_final_mask] = target_net(non_final_next_states).max(1).values
    expected = next_state_values * GAMMA + reward_batch
    loss = nn.SmoothL1Loss()(state_action_values, expected.unsqueeze(1))
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_value_(policy_net.parameters(), 100)
    optimizer.step()
    return loss.item()


def as_tensor(p):
    return torch.tensor([p], dtype=torch.double) / 3


env = Grid()
for i_episode in range(3):
    state = as_tensor(env.reset())
    loss = None
    for t in range(20):
        action = select_action(state)
        observation, reward, terminated = env.step(action.item())
        next_state = None if terminated else as_tensor(observation)
        memory.push(state, action, next_state, torch.tensor([reward]))
        state = next_state
        loss = optimize_model()
        target_sd, policy_sd = target_net.state_dict(), policy_net.state_dict()
        for key in policy_sd:
            target_sd[key] = policy_sd[key] * TAU + target_sd[key] * (1 - TAU)
        target_net.load_state_dict(target_sd)
        if terminated:
            break
    print("episode", i_episode, "length", t + 1, "loss", loss)
with torch.no_grad():
    print("Q(start) =", [f"{q:.10g}" for q in policy_net(as_tensor((0, 0)))[0].tolist()])
