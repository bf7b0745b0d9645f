# SPDX-License-Identifier: Apache-2.0
"""An average of the weights with statistics of its own, a validation that a plateau scheduler follows, two loaders."""

from itertools import cycle

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import rankwise as rw


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.norm = nn.BatchNorm1d(7)
        self.last = nn.Linear(7, 1)

    def forward(self, x):
        hidden = self.norm(self.first(x)).tanh()
        return self.last(hidden)


class Batches(IterableDataset):
    def __iter__(self):
        return iter(DataLoader(data, batch_size=8))


torch.manual_seed(0)
data = TensorDataset(torch.randn(40, 5), torch.randn(40, 1))
with rw.join() as world:
    model = rw.replicate(Net(), sync_batchnorm=True)
    average = rw.replicate(AveragedModel(model), sync_batchnorm=True)
    loader = rw.DataLoader(data, global_batch_size=8, shuffle=True)
    unlabelled = rw.DataLoader(TensorDataset(torch.randn(10, 5)), global_batch_size=4)
    validation = rw.DataLoader(TensorDataset(torch.randn(20, 5), torch.randn(20, 1)), global_batch_size=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    for _ in range(2):
        for (x, y), others in zip(loader, cycle(unlabelled)):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y) + model(others[0]).square().mean()
            loss.backward()
            optimizer.step()
        average.update_parameters(model)
        model.eval()
        with torch.no_grad():
            losses = [(nn.functional.mse_loss(model(x), y).item(), len(x)) for x, y in validation]
        model.train()
        scheduler.step(rw.mean([value for value, _ in losses], [size for _, size in losses]))
    update_bn(loader, average)
