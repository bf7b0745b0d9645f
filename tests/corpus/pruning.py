# SPDX-License-Identifier: Apache-2.0
"""Small weights are taken out between epochs, then whole rows of a layer; hooks mask the weights before each call."""

import torch
from torch import nn
from torch.nn.utils import prune

torch.set_default_dtype(torch.float64)
torch.manual_seed(50)
pictures = torch.randn(37, 1, 6, 6)
bright = (pictures.flatten(1).sum(1) > 0).long()
net = nn.Sequential(
    nn.Conv2d(1, 4, 3), nn.MaxPool2d(2), nn.ELU(), nn.Flatten(), nn.Linear(16, 10), nn.ELU(), nn.Linear(10, 2)
)
layers = [layer for layer in net if isinstance(layer, (nn.Conv2d, nn.Linear))]


def epoch(name):
    # Pruning replaces parameters, so that each epoch needs a new optimizer.
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for rows in torch.arange(37).split(8):
        loss = nn.functional.cross_entropy(net(pictures[rows]), bright[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(name, repr(loss.item()), "zeros", [int((layer.weight == 0).sum()) for layer in layers])


epoch("all weights")
for share in (0.2, 0.3):
    prune.global_unstructured([(layer, "weight") for layer in layers], prune.L1Unstructured, amount=share)
    epoch(f"without {share}")
prune.ln_structured(net[4], "weight", amount=3, n=2, dim=0)
epoch("without three rows")
for layer in layers:
    prune.remove(layer, "weight")
torch.save(net.state_dict(), "pruned.pt")
