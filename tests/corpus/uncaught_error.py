# SPDX-License-Identifier: Apache-2.0
"""Fails in the third step with an error of its own; what it printed and wrote before stays."""
import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)


class Checked(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 3:
            raise ValueError(f"bad batch of shape {tuple(x.shape)}")
        return self.fc(x)


model = Checked()
with open("progress.txt", "w") as f:
    for step in range(5):
        out = model(torch.randn(8, 3))
        print(step, out.sum().item())
        f.write(f"{step} {out.sum().item()!r}\n")
        f.flush()
