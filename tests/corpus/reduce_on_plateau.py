# SPDX-License-Identifier: Apache-2.0
"""ReduceLROnPlateau, fed by its own validation loss; a rate by LambdaLR that reads the last training loss."""
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

torch.set_default_dtype(torch.float64)
torch.manual_seed(101)
x = torch.rand(88, 2) * 6 - 3
y = torch.sinc(x.norm(dim=1, keepdim=True))
train, valid = (x[:64], y[:64]), (x[64:], y[64:])


def fit(model, optimizer, scheduler, fed):
    last = [1.0]
    rates = []
    for epoch in range(7):
        for rows in torch.randperm(64).split(15):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(train[0][rows]), train[1][rows])
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            value = nn.functional.mse_loss(model(valid[0]), valid[1]).item()
        fed.append(loss.item())
        if isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step(value)
        else:
            scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
        print(epoch, loss.item(), value, rates[-1])
    return len(set(rates))


def net():
    return nn.Sequential(nn.Linear(2, 16), nn.SiLU(), nn.Linear(16, 1))


one = net()
optimizer = torch.optim.SGD(one.parameters(), lr=1.5, momentum=0.9)
print(fit(one, optimizer, ReduceLROnPlateau(optimizer, factor=0.3, patience=0, threshold=1e-2), []), "rates")
two, fed = net(), [1.0]
optimizer = torch.optim.AdamW(two.parameters(), lr=0.1)
print(fit(two, optimizer, LambdaLR(optimizer, lambda epoch: min(1.0, 5 * fed[-1])), fed), "rates")
