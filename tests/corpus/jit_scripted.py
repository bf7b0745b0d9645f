# SPDX-License-Identifier: Apache-2.0
from typing import Tuple

import torch
import torch.nn as nn
from torch import Tensor


class Cell(nn.Module):
    def __init__(self, n_in: int, n_hid: int):
        super().__init__()
        self.ih = nn.Linear(n_in, 2 * n_hid)
        self.hh = nn.Linear(n_hid, 2 * n_hid)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        a, b = (self.ih(x) + self.hh(h)).chunk(2, 1)
        z = torch.sigmoid(a)
        return (1 - z) * h + z * torch.tanh(b)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = Cell(2, 8)
        self.out = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        h = torch.zeros(x.size(0), 8, dtype=x.dtype)
        for t in range(x.size(1)):
            h = self.cell(x[:, t], h)
        return self.out(h), h


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(71)
    model = torch.jit.script(Model())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(6):
        x = torch.randn(14, 5, 2)
        y = (x[:, :, 0] * x[:, :, 1]).sum(1, keepdim=True)
        pred, h = model(x)
        loss = (pred - y).pow(2).mean() + 1e-3 * h.pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())
    torch.jit.save(model, "scripted.ts")
    again = torch.jit.load("scripted.ts")
    print("same as loaded:", torch.equal(again(x)[0], model(x)[0]))
