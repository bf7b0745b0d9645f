# SPDX-License-Identifier: Apache-2.0
"""Attention between the patches of a picture; layers are left out at random, for each picture by itself."""

import torch
from torch import nn
from torch.nn import functional

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
SIDE, WIDTH, HEADS = 4, 16, 4


class Patches(nn.Module):
    """Cuts pictures into squares, and puts an empty one in front, which is to hold the answer."""

    def __init__(self):
        super().__init__()
        self.squares = nn.Linear(SIDE * SIDE, WIDTH)
        self.answer = nn.Parameter(torch.zeros(WIDTH))
        self.places = nn.Parameter(0.02 * torch.randn(5, WIDTH))

    def forward(self, pictures):
        squares = self.squares(functional.unfold(pictures, SIDE, stride=SIDE).mT)
        return torch.cat([self.answer.expand(len(squares), 1, WIDTH), squares], dim=1) + self.places


class Look(nn.Module):
    """Each square asks all squares."""

    def __init__(self):
        super().__init__()
        self.ask, self.offer, self.tell, self.end = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, squares):
        heads = (part(squares).unflatten(2, (HEADS, -1)).transpose(1, 2) for part in (self.ask, self.offer, self.tell))
        seen = functional.scaled_dot_product_attention(*heads, dropout_p=0.1 * self.training)
        return self.end(seen.transpose(1, 2).flatten(2))


class Perhaps(nn.Module):
    """Adds what its parts find, or for some pictures of a training batch nothing."""

    def __init__(self, chance, *parts):
        super().__init__()
        self.chance, self.parts = chance, nn.Sequential(nn.LayerNorm(WIDTH), *parts)

    def forward(self, squares):
        found = self.parts(squares)
        if self.training:
            found = found * torch.bernoulli(torch.full_like(found[:, :1, :1], self.chance)) / self.chance
        return squares + found


layers = [Patches()]
for chance in (1.0, 0.9):
    layers += [
        Perhaps(chance, Look()),
        Perhaps(chance, nn.Linear(WIDTH, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, WIDTH)),
    ]
net = nn.Sequential(*layers, nn.LayerNorm(WIDTH))
verdict = nn.Linear(WIDTH, 2)
optimizer = torch.optim.AdamW([*net.parameters(), *verdict.parameters()], lr=3e-3)
pictures = torch.randn(39, 1, 8, 8)
top_heavy = (pictures[:, 0, :4] > pictures[:, 0, 4:]).double().mean((1, 2)).round().long()
for epoch in range(2):
    net.train()
    for rows in torch.arange(39).split(9):
        loss = functional.cross_entropy(verdict(net(pictures[rows])[:, 0]), top_heavy[rows], label_smoothing=0.05)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    net.eval()
    with torch.no_grad():
        whole = functional.cross_entropy(verdict(net(pictures)[:, 0]), top_heavy)
    print("epoch", epoch, "last batch", repr(loss.item()), "all", repr(whole.item()))
