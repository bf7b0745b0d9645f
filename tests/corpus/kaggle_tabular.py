# SPDX-License-Identifier: Apache-2.0
# Two columns of codes, four of numbers. One net per fold; the test rows get the mean of all nets.
import csv
import os
import random

import numpy as np
import torch
import torch.nn as nn
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import KFold
from torch.utils.data import DataLoader, Dataset


class Settings:
    folds = 2
    rounds = 2
    codes = 6
    batch = {"learn": 24, "predict": 50}


os.environ["PYTHONHASHSEED"] = "42"
random.seed(42)
np.random.seed(43)
torch.manual_seed(44)
torch.backends.cudnn.benchmark = False
torch.set_default_dtype(torch.float64)


class Table(Dataset):
    def __init__(self, number):
        self.codes = np.random.randint(Settings.codes, size=(number, 2))
        self.numbers = np.random.normal(size=(number, 4))
        logit = 2 * self.numbers[:, 0] + 3 * (self.codes[:, 0] % 2) - 1.5
        self.bought = (np.random.rand(number) < 1 / (1 + np.exp(-logit))).astype(np.float64)
        self.rows = np.arange(number)

    def only(self, rows):
        part = Table.__new__(Table)
        vars(part).update(vars(self), rows=rows)
        return part

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        row = self.rows[number]
        return self.codes[row], self.numbers[row], self.bought[row]


class Buyer(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Embedding(Settings.codes, 3), nn.Embedding(Settings.codes, 3)
        self.level = nn.BatchNorm1d(4, affine=False)
        self.mix = nn.Linear(10, 24, bias=False)
        self.rest = nn.Sequential(nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.3), nn.Linear(24, 1))

    def forward(self, codes, numbers):
        first, second = codes.unbind(1)
        columns = [self.first(first), self.second(second), self.level(numbers)]
        return self.rest(self.mix(torch.hstack(columns)))[:, 0]


def predicted(net, table):
    net.eval()
    with torch.no_grad():
        logits = [net(codes, numbers) for codes, numbers, _ in DataLoader(table, Settings.batch["predict"])]
    return torch.cat(logits).sigmoid().numpy()


known, unknown = Table(110), Table(30)
out_of_fold, answer = np.full(110, np.nan), np.zeros(30)
for fold, (learn, keep) in enumerate(KFold(Settings.folds, shuffle=True, random_state=7).split(known.rows)):
    net = Buyer()
    loader = DataLoader(known.only(learn), Settings.batch["learn"], shuffle=True, drop_last=True)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    waves = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=3, eta_min=1e-4)
    best = -1.0
    for turn in range(Settings.rounds):
        net.train()
        losses = []
        for codes, numbers, bought in loader:
            loss = nn.functional.binary_cross_entropy_with_logits(net(codes, numbers), bought)
            net.zero_grad()
            loss.backward()
            optimizer.step()
            waves.step()
            losses.append(loss.item())
        chances = predicted(net, known.only(keep))
        area = roc_auc_score(known.bought[keep], chances)
        print("fold", fold, "round", turn, "loss", np.mean(losses).item(), "area", area)
        if area > best:
            best = area
            torch.save([net.state_dict(), chances], f"net_of_fold_{fold}.pt")
    weights, out_of_fold[keep] = torch.load(f"net_of_fold_{fold}.pt", weights_only=False)
    net.load_state_dict(weights)
    answer += predicted(net, unknown)
print("area of all rows, each by the net that has not seen it:", roc_auc_score(known.bought, out_of_fold))
with open("answer.csv", "w", newline="") as file:
    table = csv.writer(file)
    table.writerow(["row", "chance"])
    table.writerows([number, f"{chance / Settings.folds:.12f}"] for number, chance in enumerate(answer))
