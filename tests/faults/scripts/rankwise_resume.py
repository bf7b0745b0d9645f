# SPDX-License-Identifier: Apache-2.0
"""A training that saves after each epoch and resumes: dropout, Adam, a schedule, an average of the loss."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import rankwise as rw

torch.manual_seed(0)
with rw.join() as world:
    model = rw.replicate(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1)))
    loader = rw.DataLoader(TensorDataset(torch.randn(42, 6), torch.randn(42, 1)), global_batch_size=8, shuffle=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    kept = {"level": 1.0}
    checkpoints = rw.Checkpointer("runs")
    checkpoints.restore(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader, kept=kept)
    for _ in range(loader.epoch, 3):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            (loss * kept["level"]).backward()
            optimizer.step()
            scheduler.step()
            kept["level"] = 0.9 * kept["level"] + 0.1 * rw.mean(loss, len(x))
        checkpoints.save(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader, kept=kept)
