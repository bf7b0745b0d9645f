# SPDX-License-Identifier: Apache-2.0
"""A small search: each trial's result goes into a database, and the next trial asks the database for the best so far."""
import contextlib
import glob
import os
import shelve
import sqlite3

import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(181)
x = torch.rand(60, 2)
y = (x[:, :1] - x[:, 1:]).abs()


def trial(width, lr):
    model = nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 1))
    opt = torch.optim.SGD(model.parameters(), lr=lr)
    for rows in torch.randperm(60).split(14):
        loss = nn.functional.mse_loss(model(x[rows]), y[rows])
        opt.zero_grad()
        loss.backward()
        opt.step()
        yield loss.item()


with contextlib.closing(sqlite3.connect("search.db")) as db:
    db.execute("create table trial (number integer primary key, width integer, lr real)")
    db.execute("create table loss (trial integer, step integer, value real)")
    width, lr = 4, 0.05
    for number in range(5):
        db.execute("insert into trial values (?, ?, ?)", (number, width, lr))
        for step, value in enumerate(trial(width, lr)):
            db.execute("insert into loss values (?, ?, ?)", (number, step, value))
        db.commit()
        best = db.execute(
            "select width, lr, min(value) from loss join trial on trial.number = loss.trial where step > 1"
        ).fetchone()
        print(number, width, lr, "best", best)
        width, lr = best[0] + 3, best[1] * 1.5
with contextlib.closing(sqlite3.connect(":memory:")) as memory:
    memory.execute("attach 'search.db' as kept")
    print(memory.execute("select count(*), avg(value) from kept.loss").fetchone())
with shelve.open("results", flag="c") as shelf:
    shelf["best"] = {"width": best[0], "loss": best[2]}
with shelve.open("results", flag="r") as shelf:
    print(sorted(shelf), shelf["best"])
with contextlib.closing(sqlite3.connect("search.db")) as db:
    db.execute("delete from loss where step < 2")
    db.commit()
    db.execute("vacuum")
for path in glob.glob("results*"):
    os.remove(path)
