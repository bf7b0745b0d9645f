# SPDX-License-Identifier: Apache-2.0
"""A variational autoencoder of convolutions: its forward draws random numbers, but only while it is trained."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader

options = argparse.ArgumentParser()
options.add_argument("--rounds", type=int, default=2)
options.add_argument("--together", type=int, default=9, help="pictures per batch")
options.add_argument("--talk", type=int, default=2, help="batches between two lines of output")


class Guess(nn.Module):
    """Puts a picture into two uncertain numbers, and draws it again from them."""

    def __init__(self):
        super().__init__()
        self.into = nn.Sequential(
            nn.Conv2d(1, 4, 3, stride=2, padding=1),
            nn.SiLU(),
            nn.Conv2d(4, 8, 3, stride=2, padding=1),
            nn.SiLU(),
            nn.Flatten(),
        )
        self.centre, self.spread = nn.Linear(32, 2), nn.Sequential(nn.Linear(32, 2), nn.Softplus())
        self.out = nn.Sequential(
            nn.Linear(2, 32),
            nn.SiLU(),
            nn.Unflatten(1, (8, 2, 2)),
            nn.ConvTranspose2d(8, 4, 2, stride=2),
            nn.SiLU(),
            nn.ConvTranspose2d(4, 1, 2, stride=2),
        )

    def forward(self, pictures):
        seen = self.into(pictures)
        centre, spread = self.centre(seen), self.spread(seen)
        code = centre + spread * torch.randn_like(spread) if self.training else centre
        return self.out(code), centre, spread


def costs(guess, pictures):
    """Return what is drawn wrongly, and how much the numbers tell, per picture."""
    drawn, centre, spread = guess(pictures)
    told = (centre.square() + spread.square() - 1) / 2 - spread.log()
    return (drawn - pictures).square().flatten(1).sum(1), told.sum(1)


def main(rounds, together, talk):
    torch.manual_seed(2)
    torch.set_default_dtype(torch.float64)
    pictures = 0.1 * torch.randn(40, 1, 8, 8)
    for number, picture in enumerate(pictures):
        picture[0, :, number % 2 * 4 : number % 2 * 4 + 4] += 1
    guess = Guess()
    optimizer = torch.optim.Adam(guess.parameters(), lr=1e-2)
    for turn in range(rounds):
        guess.train()
        for step, batch in enumerate(DataLoader(pictures, together, shuffle=True)):
            wrong, told = costs(guess, batch)
            optimizer.zero_grad()
            (wrong + told).sum().backward()
            optimizer.step()
            if step % talk == 0:
                print(turn, step, "wrong", repr(wrong.mean().item()), "told", repr(told.mean().item()))
        guess.eval()
        with torch.no_grad():
            mirrored = [sum(costs(guess, batch)) for batch in DataLoader(pictures[:15].flip(3), together)]
        print(turn, "mirrored", repr(torch.cat(mirrored).mean().item()))


main(**vars(options.parse_args()))
