# SPDX-License-Identifier: Apache-2.0
"""A variational autoencoder without forward(): the loop calls its two halves."""
import torch
from torch import nn


class Squeezer(nn.Module):
    def __init__(self, size, code):
        super().__init__()
        self.inward = nn.Sequential(nn.Linear(size, 24), nn.Tanh())
        self.centre, self.spread = nn.Linear(24, code), nn.Linear(24, code)
        self.outward = nn.Sequential(nn.Linear(code, 24), nn.Tanh(), nn.Linear(24, size))

    def encode(self, x):
        h = self.inward(x)
        return self.centre(h), self.spread(h)

    def decode(self, code):
        return self.outward(code)


def main():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(13)
    angles = torch.rand(53) * 6.28
    waves = torch.sin(angles[:, None] + torch.linspace(0, 6.28, 17))
    squeezer = Squeezer(17, 2)
    optimizer = torch.optim.Adam(squeezer.parameters(), lr=4e-3)
    for epoch in range(3):
        seen = 0.0
        for (wave,) in torch.utils.data.DataLoader(torch.utils.data.TensorDataset(waves), 10, shuffle=True):
            centre, log_spread = squeezer.encode(wave)
            code = torch.distributions.Normal(centre, log_spread.exp()).rsample()
            missed = (squeezer.decode(code) - wave).square().sum()
            price = (centre.square() + (2 * log_spread).exp() - 2 * log_spread - 1).sum() / 2
            optimizer.zero_grad()
            (missed + price).backward()
            optimizer.step()
            seen += missed.item() + price.item()
        print("epoch", epoch, "per wave", repr(seen / len(waves)))
    with torch.no_grad():
        torch.save(squeezer.decode(torch.randn(6, 2)), "drawn.pt")


main()
