# SPDX-License-Identifier: Apache-2.0
"""How many words of a line are hidden, and how warm the attention is: globals that the loop sets and forward() reads."""
import math

import torch
from torch import nn
from torch.nn import functional as F

torch.set_default_dtype(torch.float64)
torch.manual_seed(91)

TEMPERATURE = 4.0
WIDTH = 2


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.query = nn.Linear(8, 8)
        self.out = nn.Linear(8, 3)

    def forward(self, words):
        h = self.embed(words[:, :WIDTH])
        scores = (self.query(h) * h).sum(-1) / (TEMPERATURE * math.sqrt(8))
        return self.out((scores.softmax(1).unsqueeze(-1) * h).sum(1))


def main():
    global TEMPERATURE, WIDTH
    model = Reader()
    opt = torch.optim.Adam(model.parameters(), lr=0.02)
    words = torch.randint(20, (66, 9))
    kinds = words.sum(1) % 3
    for epoch in range(4):
        for i, rows in enumerate(torch.randperm(66).split(10)):
            TEMPERATURE = max(0.5, TEMPERATURE * 0.9)
            if i == 5:
                WIDTH += 2
            loss = F.cross_entropy(model(words[rows]), kinds[rows])
            opt.zero_grad()
            loss.backward()
            opt.step()
        print(epoch, WIDTH, TEMPERATURE, loss.item())
    with torch.no_grad():
        for WIDTH in (1, 5, 9):
            print("with", WIDTH, "words:", F.cross_entropy(model(words), kinds).item())


main()
