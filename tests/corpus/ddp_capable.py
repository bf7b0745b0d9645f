# SPDX-License-Identifier: Apache-2.0
"""One process learns alone; several, started by torchrun, share the rows and average the gradients."""
import os

import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH = 12


def in_a_group():
    return distributed.is_available() and distributed.is_initialized()


def place_and_number():
    return (distributed.get_rank(), distributed.get_world_size()) if in_a_group() else (0, 1)


def mean_of_all(value):
    if in_a_group():
        distributed.all_reduce(value)
        value /= distributed.get_world_size()
    return value.item()


if "RANK" in os.environ:
    distributed.init_process_group("gloo")
place, number = place_and_number()
torch.set_default_dtype(torch.float64)
torch.manual_seed(43)
rows = torch.randn(50, 6)
pairs = TensorDataset(rows, rows[:, :3].argmax(1))
bare = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3))
if in_a_group():
    net = nn.parallel.DistributedDataParallel(bare)
    turns = DistributedSampler(pairs, number, place)
    loader = DataLoader(pairs, BATCH // number, sampler=turns)
else:
    net, turns = bare, None
    loader = DataLoader(pairs, BATCH, shuffle=True)
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
for epoch in range(2):
    if turns:
        turns.set_epoch(epoch)
    for row, kind in loader:
        loss = nn.functional.cross_entropy(net(row), kind)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    mean = mean_of_all(loss.detach().clone())
    if place == 0:
        print("epoch", epoch, "processes", number, "here", os.environ.get("LOCAL_WORLD_SIZE", 1), "loss", mean)
        torch.save(bare.state_dict(), "net.pt")
if in_a_group():
    distributed.destroy_process_group()
