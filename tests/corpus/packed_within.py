# SPDX-License-Identifier: Apache-2.0
"""Sequences packed within the model: their last states, and all of their states, padded to the length of the batch."""
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

torch.set_default_dtype(torch.float64)
torch.manual_seed(5)
lengths = torch.randint(2, 10, (53,))
words = [torch.randint(1, 17, (int(n),)) for n in lengths]
kinds = torch.tensor([int(one[-1]) % 3 for one in words])


class LastState(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(17, 6, padding_idx=0)
        self.lstm = nn.LSTM(6, 7, num_layers=2, batch_first=True, bidirectional=True)
        self.first = nn.Parameter(torch.zeros(4, 1, 7))
        self.out = nn.Linear(28, 3)

    def forward(self, padded, lengths):
        packed = pack_padded_sequence(self.emb(padded), lengths, batch_first=True, enforce_sorted=False)
        start = self.first.expand(-1, len(padded), -1).contiguous()
        _, (h, c) = self.lstm(input=packed, hx=(start, torch.zeros_like(start)))
        return self.out(torch.cat([h[-2], h[-1], c[-2], c[-1]], 1))


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(17, 6)
        self.gru = nn.GRU(6, 8)
        self.rnn = nn.RNN(8, 5)
        self.out = nn.Linear(5, 4)

    def forward(self, padded, lengths):
        packed = pack_padded_sequence(self.emb(padded).transpose(0, 1), lengths)
        states, _ = pad_packed_sequence(self.rnn(self.gru(packed)[0])[0], total_length=padded.shape[1])
        mask = torch.arange(padded.shape[1]) < lengths[:, None]
        return self.out(states.transpose(0, 1)).masked_fill(~mask[..., None], 0.0)


model = LastState()
opt = torch.optim.Adam(model.parameters(), lr=0.02)
for epoch in range(3):
    for rows in torch.randperm(53).split(12):
        scores = model(pad_sequence([words[i] for i in rows], batch_first=True), lengths[rows])
        loss = nn.functional.cross_entropy(scores, kinds[rows])
        opt.zero_grad()
        loss.backward()
        opt.step()
    print("last", epoch, loss.item())

model = Tagger()
opt = torch.optim.SGD(model.parameters(), lr=0.5)
for epoch in range(3):
    for rows in torch.randperm(53).split(12):
        rows = rows[lengths[rows].argsort(descending=True)]
        padded = pad_sequence([words[i] for i in rows], batch_first=True)
        tags = model(padded, lengths[rows])
        loss = nn.functional.cross_entropy(tags.flatten(0, 1), (padded % 4).flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
    print("tags", epoch, tuple(tags.shape), loss.item())
