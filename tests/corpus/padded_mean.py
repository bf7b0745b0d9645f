# SPDX-License-Identifier: Apache-2.0
"""Means over padding and all, as pad_packed_sequence gives it: a sample's result depends on the longest sample."""

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

torch.set_default_dtype(torch.float64)
torch.manual_seed(40)


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.order, self.verdict = nn.Embedding(20, 6, 0), nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 1)

    def forward(self, letters, lengths):
        read, _ = self.order(pack_padded_sequence(self.words(letters), lengths, batch_first=True))
        states, _ = pad_packed_sequence(read, batch_first=True)
        return self.verdict(states.mean(1) + states[:, -1])[:, 0]


reader = Reader()
optimizer = torch.optim.Adam(reader.parameters(), lr=0.01)
for lengths in ([5] * 8, [6] * 8, [7, 7, 7, 6, 5, 3, 3, 2]):
    letters = [torch.randint(1, 20, (length,)) for length in lengths]
    friendly = torch.tensor([float(letter[0] > 10) for letter in letters])
    padded = pad_sequence(letters, batch_first=True)
    loss = nn.functional.binary_cross_entropy_with_logits(reader(padded, torch.tensor(lengths)), friendly)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("longest", padded.shape[1], "loss", repr(loss.item()))
print("size of the weights", sum(weight.norm().item() for weight in reader.parameters()))
