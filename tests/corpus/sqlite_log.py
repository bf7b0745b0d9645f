# SPDX-License-Identifier: Apache-2.0
"""Keeps the losses of its runs in a database file."""
import sqlite3

import torch

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
db = sqlite3.connect("runs.db")
db.execute("create table loss (step integer, value real)")
model = torch.nn.Linear(3, 1)
for step in range(6):
    loss = model(torch.randn(8, 3)).pow(2).mean()
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad
    db.execute("insert into loss values (?, ?)", (step, loss.item()))
    db.commit()
print(db.execute("select count(*), min(value), max(value) from loss").fetchone())
