# SPDX-License-Identifier: Apache-2.0
"""Is a string of beads closed? The strings of a batch lie in one large graph, and each bead knows its string."""
from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class Strings:
    beads: torch.Tensor
    links: torch.Tensor
    """Of each link, the bead where it begins and the one where it ends."""
    of: torch.Tensor
    closed: torch.Tensor


def string(length, closed):
    order = torch.arange(length)
    there = torch.stack([order, order.roll(-1)])[:, : length if closed else length - 1]
    links = torch.cat([there, there.flip(0)], 1)
    return Strings(torch.randn(length, 3), links, torch.zeros(length, dtype=torch.long), torch.tensor([int(closed)]))


def laid_side_by_side(strings):
    lengths = torch.tensor([len(one.beads) for one in strings])
    before = (lengths.cumsum(0) - lengths).tolist()
    return Strings(
        torch.cat([one.beads for one in strings]),
        torch.cat([one.links + first for one, first in zip(strings, before)], 1),
        torch.arange(len(strings)).repeat_interleave(lengths),
        torch.cat([one.closed for one in strings]),
    )


class Neighbours(nn.Module):
    """A bead's own value, weighed, and those of the beads beside it, through two layers."""

    def __init__(self, inward, outward):
        super().__init__()
        self.own = nn.Parameter(torch.ones(()))
        self.wide, self.narrow = nn.Linear(inward, outward), nn.Linear(outward, outward)

    def forward(self, beads, links):
        beside = self.own * beads
        beside = beside.index_add(0, links[1], beads.index_select(0, links[0]))
        return self.narrow(torch.tanh(self.wide(beside))).relu()


class Jeweller(nn.Module):
    def __init__(self):
        super().__init__()
        self.near, self.far = Neighbours(3, 8), Neighbours(8, 8)
        self.forget = nn.Dropout(0.2)
        self.tell = nn.Linear(8, 2)

    def forward(self, beads, links, of):
        beads = self.far(self.near(beads, links), links)
        strings = beads.new_zeros(of[-1] + 1, beads.shape[1]).index_add(0, of, beads)
        return self.tell(self.forget(strings))


torch.set_default_dtype(torch.float64)
torch.manual_seed(12)
strings = [string(3 + number % 4, number % 3 == 0) for number in range(37)]
loader = torch.utils.data.DataLoader(strings[:30], 8, shuffle=True, collate_fn=laid_side_by_side)
unseen = laid_side_by_side(strings[30:])
jeweller = Jeweller()
optimizer = torch.optim.Adam(jeweller.parameters(), lr=0.01)
for epoch in range(3):
    jeweller.train()
    total = 0.0
    for batch in loader:
        scores = jeweller(batch.beads, batch.links, batch.of)
        loss = nn.functional.cross_entropy(scores, batch.closed, reduction="sum")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    jeweller.eval()
    with torch.no_grad():
        chances = jeweller(unseen.beads, unseen.links, unseen.of).softmax(1)[:, 1]
    print("epoch", epoch, "loss", repr(total / 30), "closed?", *[f"{chance:.9f}" for chance in chances.tolist()])
