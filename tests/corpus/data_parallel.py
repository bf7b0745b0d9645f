# SPDX-License-Identifier: Apache-2.0
"""Uses all GPUs if there are some; the weights are saved without the wrapper, after each epoch."""
from pathlib import Path

import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(1)


class PulseCounter(nn.Module):
    def __init__(self):
        super().__init__()
        self.slide = nn.Conv1d(1, 4, 3)
        self.count = nn.Linear(16, 3)

    def forward(self, signal):
        return self.count(nn.functional.adaptive_max_pool1d(self.slide(signal).relu(), 4).flatten(1))


def main():
    weights = Path("weights")
    weights.mkdir(exist_ok=True)
    where = "cuda" if torch.cuda.is_available() else "cpu"
    counter = nn.DataParallel(PulseCounter()).to(where)
    optimizer = torch.optim.SGD(counter.parameters(), lr=0.05)
    signals = torch.randn(47, 1, 12)
    pulses = (signals > 1.5).sum((1, 2)).clamp(max=2)
    for epoch in range(3):
        for signal, number in zip(signals.split(10), pulses.split(10)):
            scores = counter(signal.to(where))
            loss = nn.functional.cross_entropy(scores, number.to(where))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print("epoch", epoch, "scores of the last batch", list(scores.shape), "loss", repr(loss.item()))
        torch.save(counter.module.state_dict(), weights / f"after_{epoch}.pt")
    print("names in the wrapper:", *counter.state_dict())


main()
