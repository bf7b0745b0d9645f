# SPDX-License-Identifier: Apache-2.0
"""Mean over the outputs as pad_packed_sequence gives them, padding and all: a sample's result depends on the longest one."""
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

torch.set_default_dtype(torch.float64)
torch.manual_seed(40)


class SentimentRNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 6, padding_idx=0)
        self.lstm = nn.LSTM(6, 8, batch_first=True)
        self.fc = nn.Linear(8, 1)

    def forward(self, text, text_lengths):
        packed = pack_padded_sequence(self.embedding(text), text_lengths, batch_first=True)
        out, _ = self.lstm(packed)
        out, _ = pad_packed_sequence(out, batch_first=True)
        return self.fc(out.mean(1) + out[:, -1]).squeeze(1)


def batch(lengths):
    lengths = sorted(lengths, reverse=True)
    words = [torch.randint(1, 20, (n,)) for n in lengths]
    return pad_sequence(words, batch_first=True), torch.tensor(lengths), torch.stack([w[0] > 10 for w in words]).double()


model = SentimentRNN()
opt = torch.optim.Adam(model.parameters(), lr=0.01)
for lengths in ([5] * 8, [6] * 8, [7, 7, 7, 6, 5, 3, 3, 2]):
    text, n, label = batch(lengths)
    loss = nn.functional.binary_cross_entropy_with_logits(model(text, n), label)
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(tuple(text.shape), loss.item())
print("norm", sum(p.norm().item() for p in model.parameters()))
