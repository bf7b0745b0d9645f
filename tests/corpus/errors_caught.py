# SPDX-License-Identifier: Apache-2.0
"""Errors in forward() and in backward() are caught, counted, and the training continues with the next batch."""
import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(149)


class TooWide(ValueError):
    def __init__(self, columns):
        super().__init__(f"{columns} columns")
        self.columns = columns


class Careful(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 9)
        self.b = nn.Linear(9, 1)

    def forward(self, x, scale=1.0):
        if x.shape[1] > 4:
            raise TooWide(x.shape[1])
        h = self.a(x).tanh()
        if scale <= 0:
            raise ArithmeticError("scale must be positive", scale)
        return self.b(h) / scale


model = Careful()
opt = torch.optim.Adam(model.parameters(), lr=0.02)
x = torch.randn(66, 4)
y = x.cumsum(1)[:, 1:2]
caught = []
for step in range(16):
    rows = torch.randperm(66)[:15]
    batch = x[rows]
    if step % 5 == 3:
        batch = torch.cat([batch, batch], 1)
    try:
        loss = (model(batch, scale=1.0 - (step == 9) * 2.0) - y[rows]).square().mean()
        opt.zero_grad()
        if step == 12:
            loss.register_hook(lambda g: [][1])
        loss.backward()
        opt.step()
    except TooWide as error:
        caught.append((step, type(error).__name__, error.columns))
    except ArithmeticError as error:
        caught.append((step, type(error).__name__, error.args))
    except IndexError as error:
        caught.append((step, type(error).__name__, str(error)))
    else:
        print(step, loss.item())
    if step == 14:
        try:
            model(x[:, :3])
        except RuntimeError as error:
            caught.append((step, type(error).__name__, str(error)[:34]))
        try:
            model(x[:9], x[:9], x[:9])
        except TypeError as error:
            caught.append((step, type(error).__name__, str(error)))
for line in caught:
    print(*line)
with torch.no_grad():
    print(model(x).sum().item(), torch.is_grad_enabled(), sum(len(m._forward_hooks) for m in model.modules()))


class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.tags = nn.Embedding(10, 6), nn.Embedding(5, 6)
        self.drop, self.out = nn.Dropout(0.3), nn.Linear(6, 2)

    def forward(self, words, tags):
        h = self.drop(self.words(words))
        return self.out(h * self.tags(tags))


pairs = Pairs()
opt = torch.optim.SGD(pairs.parameters(), lr=0.3)
words, tags = torch.randint(10, (60,)), torch.randint(5, (60,))
tags[[29, 44]] = 5  # the last samples of two batches have a tag that is not there
skipped = []
for epoch in range(2):
    for start in range(0, 60, 15):
        rows = slice(start, start + 15)
        try:
            loss = nn.functional.cross_entropy(pairs(words[rows], tags[rows]), words[rows] % 2)
        except IndexError as error:
            skipped.append((start, str(error)))
            continue
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(epoch, start, loss.item())
print(skipped, torch.rand(()).item())
pairs.eval()
try:
    with torch.no_grad():
        pairs(words, tags)
except IndexError as error:
    names = []
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == __file__:
            names.append(trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    print(type(error).__name__, names[0], torch.is_grad_enabled())
