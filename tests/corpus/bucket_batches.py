# SPDX-License-Identifier: Apache-2.0
"""Sentences in buckets of similar length: own batch sampler, padding, packed LSTM."""
import random

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence


class BucketSampler(torch.utils.data.Sampler):
    def __init__(self, lengths, batch_size):
        self.lengths, self.batch_size = lengths, batch_size

    def __iter__(self):
        order = sorted(range(len(self.lengths)), key=lambda i: (self.lengths[i], random.random()))
        batches = [order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)]
        random.shuffle(batches)
        yield from batches

    def __len__(self):
        return -(-len(self.lengths) // self.batch_size)


def pad(batch):
    seqs, labels = zip(*batch)
    lengths = torch.tensor([len(s) for s in seqs])
    return pad_sequence(seqs, batch_first=True), lengths, torch.tensor(labels)


class Tagger(nn.Module):
    def __init__(self, vocab=12, dim=9):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim, padding_idx=0)
        self.lstm = nn.LSTM(dim, dim, batch_first=True, bidirectional=True)
        self.fc = nn.Linear(2 * dim, 2)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(self.emb(x), lengths, batch_first=True, enforce_sorted=False)
        output, (hidden, _) = self.lstm(packed)
        output, _ = pad_packed_sequence(output, batch_first=True)
        return self.fc(torch.cat([hidden[-2], hidden[-1]], dim=1)), output


def main():
    random.seed(2)
    torch.manual_seed(2)
    torch.set_default_dtype(torch.float64)
    data = []
    for _ in range(41):
        s = torch.randint(1, 12, (random.randint(2, 8),))
        data.append((s, int((s > 6).sum() * 2 > len(s))))
    sampler = BucketSampler([len(s) for s, _ in data], 6)
    loader = torch.utils.data.DataLoader(data, batch_sampler=sampler, collate_fn=pad)
    net = Tagger()
    opt = torch.optim.Adam(net.parameters(), lr=0.01)
    for epoch in range(2):
        total, right = 0.0, 0
        for x, lengths, y in loader:
            logits, output = net(x, lengths)
            loss = nn.functional.cross_entropy(logits, y) + 1e-3 * output.pow(2).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.item() * len(y)
            right += (logits.argmax(-1) == y).sum().item()
        print(f"Epoch {epoch + 1}: loss {total / len(data):.12g} acc {right / len(data):.4f} in {len(loader)} batches")


if __name__ == "__main__":
    main()
