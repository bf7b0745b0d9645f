# SPDX-License-Identifier: Apache-2.0
"""Stops once nothing has become better for two epochs, keeps the best weights in a file and goes back to them."""
import csv

import torch
from sklearn.datasets import load_diabetes
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(12)
x, y = (torch.tensor(part) for part in load_diabetes(return_X_y=True))
y = (y - y.mean()) / y.std()
order = torch.randperm(len(x))
known, held_back = order[:90], order[90:140]
net = nn.Sequential(nn.Linear(10, 40), nn.ReLU(), nn.Dropout(0.1), nn.Linear(40, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=0.08)
best, since = float("inf"), 0
with open("errors.csv", "w", newline="") as table:
    writer = csv.writer(table)
    for epoch in range(25):
        net.train()
        for rows in torch.randperm(len(known)).split(19):
            chosen = known[rows]
            error = nn.functional.l1_loss(net(x[chosen])[:, 0], y[chosen])
            optimizer.zero_grad()
            error.backward()
            optimizer.step()
        net.eval()
        with torch.no_grad():
            now = nn.functional.l1_loss(net(x[held_back])[:, 0], y[held_back]).item()
        writer.writerow([epoch, repr(now)])
        since = 0 if now < best else since + 1
        if since == 0:
            best = now
            torch.save(net.state_dict(), "best.pt")
        if since == 2:
            print("nothing better since epoch", epoch - 2)
            break
net.load_state_dict(torch.load("best.pt"))
with torch.no_grad():
    print("best", repr(best), "again", repr(nn.functional.l1_loss(net(x[held_back])[:, 0], y[held_back]).item()))
