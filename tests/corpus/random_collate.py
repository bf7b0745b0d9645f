# SPDX-License-Identifier: Apache-2.0
"""A collate_fn that crops and scales the batch at random, with a loader that shuffles by a generator of its own."""
import random

import torch
from torch.utils.data import DataLoader


class RandomCrop:
    def __init__(self, widths):
        self.widths = widths

    def __call__(self, samples):
        width = random.choice(self.widths)
        xs, ys = [], []
        for signal, label in samples:
            start = torch.randint(0, len(signal) - width + 1, ()).item()
            xs.append(signal[start : start + width])
            ys.append(label)
        return torch.stack(xs).unsqueeze(1) * random.uniform(0.9, 1.1), torch.tensor(ys)


if __name__ == "__main__":
    random.seed(0)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    t = torch.linspace(0, 12, 40)
    data = [(torch.sin(t * (1 + i % 3)) + 0.2 * torch.randn(40), i % 3) for i in range(46)]
    loader = DataLoader(data, batch_size=7, shuffle=True, collate_fn=RandomCrop([16, 20, 24]), generator=torch.Generator().manual_seed(9))
    net = torch.nn.Sequential(
        torch.nn.Conv1d(1, 6, 5), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool1d(2), torch.nn.Flatten(), torch.nn.Linear(12, 3)
    )
    opt = torch.optim.Adam(net.parameters(), lr=0.01)
    for epoch in range(2):
        widths = []
        for x, y in loader:
            loss = torch.nn.functional.cross_entropy(net(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            widths.append(x.shape[-1])
        print(epoch, widths, loss.item())
