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
