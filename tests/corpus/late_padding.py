# SPDX-License-Identifier: Apache-2.0
"""Lines of poems, sorted by length: the first batches need no padding, later ones do; pooled over the packed outputs."""
import torch
from torch import nn
from torch.nn.utils import rnn

torch.set_default_dtype(torch.float64)
torch.manual_seed(41)
lengths = [4] * 30 + [5, 6, 7, 8, 9, 10] * 4
data = [torch.randn(n, 3) for n in lengths]
target = torch.stack([d.sum(0)[:1].tanh() for d in data])


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(3, 7, batch_first=True)
        self.fc = nn.Linear(7, 1)

    def forward(self, x, lengths):
        out, _ = self.gru(rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
        out, lengths = rnn.pad_packed_sequence(out, batch_first=True)
        return out, self.fc(out.sum(1) / lengths.unsqueeze(1))


model = Reader()
opt = torch.optim.Adam(model.parameters(), lr=0.01)
for start in range(0, len(data), 6):
    part = data[start : start + 6]
    out, pred = model(rnn.pad_sequence(part, batch_first=True), torch.tensor([len(p) for p in part]))
    loss = (pred - target[start : start + 6]).pow(2).mean() + 1e-2 * out.pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(start, tuple(out.shape), loss.item())
