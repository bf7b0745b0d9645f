# SPDX-License-Identifier: Apache-2.0
import random

import numpy as np
import torch
import torch.nn as nn


def set_seed(s):
    random.seed(s)
    np.random.seed(s)
    torch.manual_seed(s)


set_seed(3)
torch.set_default_dtype(torch.float64)
names = "anna berta carla dora emma frida greta hanna ida jana klara lena mia nora olga paula rosa sara tina ulla vera".split()
alphabet = "." + "".join(sorted(set("".join(names))))
c2i = {c: i for i, c in enumerate(alphabet)}


class CharRNN(nn.Module):
    def __init__(self, vocab, emb=8, hidden=14):
        super().__init__()
        self.hidden = hidden
        self.emb = nn.Embedding(vocab, emb)
        self.gru = nn.GRU(emb, hidden, batch_first=True)
        self.out = nn.Linear(hidden, vocab)

    def forward(self, x, h=None):
        y, h = self.gru(self.emb(x), h)
        return self.out(y), h


def encode(words):
    width = max(map(len, words)) + 2
    rows = [[0] + [c2i[c] for c in w] + [0] * (width - 1 - len(w)) for w in words]
    t = torch.tensor(rows)
    return t[:, :-1], t[:, 1:]


def sample(model, n=5):
    model.eval()
    x, h, out = torch.zeros(1, 1, dtype=torch.long), None, ""
    with torch.no_grad():
        for _ in range(n):
            logits, h = model(x, h)
            p = torch.softmax(logits[0, -1] / 0.9, 0)
            x = torch.multinomial(p, 1).view(1, 1)
            out += alphabet[x.item()]
    model.train()
    return out


model = CharRNN(len(alphabet))
opt = torch.optim.Adam(model.parameters(), lr=0.02)
loss_fn = nn.CrossEntropyLoss()
for epoch in range(3):
    random.shuffle(names)
    losses = []
    for i in range(0, len(names), 4):
        x, y = encode(names[i : i + 4])
        opt.zero_grad()
        logits, _ = model(x)
        loss = loss_fn(logits.transpose(1, 2), y)
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
        opt.step()
        losses.append(loss.item())
    print(epoch, np.mean(losses), len(losses), sample(model))
