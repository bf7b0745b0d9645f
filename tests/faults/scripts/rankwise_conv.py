# SPDX-License-Identifier: Apache-2.0
"""Images with rankwise: BatchNorm over all ranks, dropout, AdamW, clipped gradients, a progress bar, a log file."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import rankwise as rw


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3)
        self.norm = nn.BatchNorm2d(6)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(6 * 36, 4)

    def forward(self, images):
        hidden = torch.relu(self.norm(self.conv(images)))
        return self.head(self.drop(hidden.flatten(1)))


with rw.join() as world:
    torch.manual_seed(0)
    images = torch.randn(120, 1, 8, 8)
    labels = images.mean((1, 2, 3)).mul(20).long().clamp(0, 3)
    model = rw.replicate(Net().to(world.device), sync_batchnorm=True)
    loader = rw.DataLoader(TensorDataset(images, labels), global_batch_size=24, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for epoch in range(2):
        for batch, target in rw.progress(loader):
            loss = nn.functional.cross_entropy(model(batch), target)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        if world.rank == 0:
            with open("log.txt", "a") as file:
                file.write(f"epoch {epoch}\n")
