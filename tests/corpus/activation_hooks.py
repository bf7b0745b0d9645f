# SPDX-License-Identifier: Apache-2.0
"""Hooks keep what two layers sent on in the last batch, and how many rows came in."""
from functools import partial

import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(35)
sent, came = {}, []


def keep(place, layer, given, result):
    sent[place] = result.detach()


class Sorter(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.bent, self.out = nn.Linear(5, 14), nn.ReLU(), nn.Linear(14, 3)

    def forward(self, rows):
        return self.out(self.bent(self.wide(rows)))


sorter = Sorter()
for place in ("wide", "bent"):
    sorter.get_submodule(place).register_forward_hook(partial(keep, place))
sorter.register_forward_pre_hook(lambda layer, given: came.append(len(given[0])))
optimizer = torch.optim.SGD(sorter.parameters(), lr=0.1)
rows = torch.randn(39, 5)
kinds = rows[:, :3].argmax(1)
for epoch in range(2):
    for part, kind in zip(rows.split(8), kinds.split(8)):
        loss = nn.functional.cross_entropy(sorter(part), kind)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    silent = (sent["bent"] == 0).sum().item()
    print("epoch", epoch, "loss", loss.item(), "before the bend", sent["wide"].mean().item())
    print("  of", sent["bent"].numel(), "values after it", silent, "are zero")
print("rows of all batches:", came)
