# SPDX-License-Identifier: Apache-2.0
"""Trains two epochs, and then, as another start of the same script would, continues from the file that it wrote."""

from pathlib import Path

import torch
from torch import nn

FILE = Path("kept", "after_epoch.pt")


def parts_of_training():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 12), nn.Dropout(0.2), nn.ReLU(), nn.Linear(12, 2))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    return {"net": net, "optimizer": optimizer, "rate": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)}


def train_until(last, points, inside):
    parts, done = parts_of_training(), 0
    if FILE.exists():
        kept = torch.load(FILE)
        done = kept.pop("done")
        torch.set_rng_state(kept.pop("numbers"))
        for name, state in kept.items():
            parts[name].load_state_dict(state)
    else:
        FILE.parent.mkdir()
    print("continues after", done, "epochs")
    while done < last:
        for rows in torch.randperm(len(points)).chunk(5):
            loss = nn.functional.cross_entropy(parts["net"](points[rows]), inside[rows])
            parts["optimizer"].zero_grad()
            loss.backward()
            parts["optimizer"].step()
        parts["rate"].step()
        done += 1
        print(done, "loss", repr(loss.item()), "rate", parts["rate"].get_last_lr()[0])
        states = {name: part.state_dict() for name, part in parts.items()}
        torch.save({"done": done, "numbers": torch.get_rng_state(), **states}, FILE)
    return parts["net"]


torch.set_default_dtype(torch.float64)
torch.manual_seed(1)
points = torch.randn(43, 6)
inside = (points[:, :2].prod(1) > 0).long()
train_until(2, points, inside)
print("weights", sum(weight.abs().sum().item() for weight in train_until(4, points, inside).parameters()))
