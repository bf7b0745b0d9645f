# SPDX-License-Identifier: Apache-2.0
"""nn.Transformer, time first, reverses short sequences of numbers; padding is hidden and does not count."""
import torch
from torch import nn

torch.manual_seed(31)
torch.set_default_dtype(torch.float64)
NOTHING, BEGIN, NUMBERS, LONGEST = 0, 1, 9, 6


def one_pair():
    row = torch.randint(2, NUMBERS, (int(torch.randint(3, LONGEST, ())),))
    fill = torch.full((LONGEST - len(row),), NOTHING)
    return torch.cat([row, fill]), torch.cat([torch.tensor([BEGIN]), row.flip(0), fill])


class Reverser(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.numbers = nn.Embedding(NUMBERS, width)
        self.places = nn.Parameter(torch.randn(LONGEST + 1, 1, width) * 0.1)
        self.both = nn.Transformer(width, 2, 1, 1, 32, dropout=0.1)
        self.answer = nn.Linear(width, NUMBERS)

    def forward(self, given, wanted):
        later = torch.ones(len(wanted), len(wanted), dtype=torch.bool).triu(1)
        out = self.both(
            self.numbers(given) + self.places[: len(given)],
            self.numbers(wanted) + self.places[: len(wanted)],
            tgt_mask=later,
            src_key_padding_mask=given.T == NOTHING,
            tgt_key_padding_mask=wanted.T == NOTHING,
            memory_key_padding_mask=given.T == NOTHING,
        )
        return self.answer(out)


reverser = Reverser()
optimizer = torch.optim.Adam(reverser.parameters(), lr=4e-3)
pairs = [one_pair() for _ in range(41)]
for epoch in range(2):
    total = 0.0
    for given, wanted in torch.utils.data.DataLoader(pairs, batch_size=12, shuffle=True):
        given, wanted = given.T, wanted.T
        scores = reverser(given, wanted[:-1])
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), wanted[1:].flatten(), ignore_index=NOTHING)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    print("epoch", epoch, repr(total))
