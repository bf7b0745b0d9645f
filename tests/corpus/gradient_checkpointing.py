# SPDX-License-Identifier: Apache-2.0
"""Both kinds of activation checkpointing, with dropout within."""
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential


class Deep(nn.Module):
    def __init__(self, mode):
        super().__init__()
        self.mode = mode
        self.inp = nn.Linear(6, 16)
        self.body = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Dropout(0.2)) for _ in range(4)])
        self.out = nn.Linear(16, 1)

    def forward(self, x):
        h = self.inp(x)
        if self.mode == "sequential":
            h = checkpoint_sequential(self.body, 2, h, use_reentrant=False)
        elif self.mode is None:
            h = self.body(h)
        else:
            for layer in self.body:
                h = checkpoint(layer, h, use_reentrant=self.mode == "reentrant")
        return self.out(h)


torch.set_default_dtype(torch.float64)
for mode in (None, "reentrant", "no_reentrant", "sequential"):
    torch.manual_seed(36)
    model = Deep(mode)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(4):
        x = torch.randn(11, 6)
        loss = (model(x) - x.norm(dim=1, keepdim=True)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(mode, loss.item(), sum(p.grad.abs().sum().item() for p in model.parameters()))
