# SPDX-License-Identifier: Apache-2.0
"""Names of different lengths, packed; once unsorted within the model, once packed by the script and given as such."""
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence, pad_sequence

torch.set_default_dtype(torch.float64)
torch.manual_seed(109)
names = [torch.randint(1, 14, (int(n),)) for n in torch.randint(2, 9, (46,))]
kinds = torch.tensor([int(name[-1]) % 3 for name in names])


class Inside(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(14, 6, padding_idx=0)
        self.gru = nn.GRU(6, 9, batch_first=True, bidirectional=True)
        self.out = nn.Linear(18, 3)

    def forward(self, padded, lengths):
        packed = pack_padded_sequence(self.emb(padded), lengths, batch_first=True, enforce_sorted=False)
        out, h = self.gru(packed)
        out, _ = pad_packed_sequence(out, batch_first=True)
        return self.out(torch.cat([h[0], h[1]], 1)), out.sum(1)


class Outside(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(5, 7)
        self.out = nn.Linear(7, 3)

    def forward(self, packed):
        _, (h, _) = self.lstm(packed)
        return self.out(h[-1])


model = Inside()
opt = torch.optim.Adam(model.parameters(), lr=0.02)
for epoch in range(2):
    for rows in torch.randperm(46).split(11):
        padded = pad_sequence([names[i] for i in rows], batch_first=True)
        lengths = torch.tensor([len(names[i]) for i in rows])
        scores, sums = model(padded, lengths)
        loss = nn.functional.cross_entropy(scores, kinds[rows]) + 1e-3 * sums.pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    print("inside", epoch, tuple(padded.shape), loss.item())

vectors = [torch.randn(len(name), 5) for name in names]
model = Outside()
opt = torch.optim.SGD(model.parameters(), lr=0.3)
for epoch in range(2):
    for rows in torch.randperm(46).split(11):
        packed = pack_sequence([vectors[i] for i in rows], enforce_sorted=False)
        loss = nn.functional.cross_entropy(model(packed), kinds[rows])
        opt.zero_grad()
        loss.backward()
        opt.step()
    print("outside", epoch, packed.batch_sizes.tolist(), loss.item())
