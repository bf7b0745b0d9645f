# SPDX-License-Identifier: Apache-2.0
"""A pipeline of two stages, with clipped gradients and a learning rate that decays."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import rankwise as rw

torch.manual_seed(0)
with rw.join() as world:
    rw.mesh(pp=-1)
    data = TensorDataset(torch.randn(41, 6), torch.randn(41, 1))
    loader = rw.DataLoader(data, global_batch_size=16, shuffle=True)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    step = rw.pipeline(model, nn.functional.mse_loss, example=torch.randn(16, 6), micro_batches=4, split="3")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.9)
    for _ in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            loss = step(x, y)
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            scheduler.step()
