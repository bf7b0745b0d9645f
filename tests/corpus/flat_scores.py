# SPDX-License-Identifier: Apache-2.0
"""Outputs whose rows are flattened with another dimension: view, flatten, einops-like reshapes, and (loss, flat scores)."""
import torch
from torch import nn
from torch.nn import functional as F

torch.set_default_dtype(torch.float64)
torch.manual_seed(107)


class Tagger(nn.Module):
    """Returns (loss, scores), both of all tokens of the batch."""

    def __init__(self, tags=5):
        super().__init__()
        self.emb = nn.Embedding(23, 10)
        self.lstm = nn.LSTM(10, 8, batch_first=True, bidirectional=True)
        self.out = nn.Linear(16, tags)

    def forward(self, words, tags=None):
        h, _ = self.lstm(self.emb(words))
        logits = self.out(h)
        logits = logits.view(-1, logits.shape[-1])
        loss = None
        if tags is not None:
            loss = F.cross_entropy(logits, tags.view(-1))
        return loss, logits


class Patches(nn.Module):
    """Batch and time are one dimension inside, as video models have it; comes out as (B * T, classes)."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.out = nn.Linear(4, 3)

    def forward(self, video):
        b, t = video.shape[:2]
        h = self.conv(video.flatten(0, 1)).relu().mean((2, 3))
        h = h.view(b, t, -1)
        h = h + h.roll(1, 1)
        return self.out(h.reshape(b * t, -1)), h.sum(1)


words = torch.randint(23, (37, 7))
tags = (words + words.roll(1, 1)) % 5
tagger = Tagger()
opt = torch.optim.Adam(tagger.parameters(), lr=0.02)
for rows in [r for _ in range(3) for r in torch.randperm(37).split(10)]:
    loss, logits = tagger(words[rows], tags=tags[rows])
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(tuple(logits.shape), loss.item(), (logits.argmax(1) == tags[rows].view(-1)).sum().item())
with torch.no_grad():
    loss, logits = tagger(words)
    print(loss, logits.sum().item(), logits[7 * 36 :, 1].sum().item())

video = torch.randn(22, 4, 1, 6, 6)
kinds = (video.mean((2, 3, 4)) * 9).abs().long().clamp(max=2)
patches = Patches()
opt = torch.optim.SGD(patches.parameters(), lr=0.5)
for rows in [r for _ in range(3) for r in torch.randperm(22).split(6)]:
    scores, summary = patches(video[rows])
    loss = F.cross_entropy(scores, kinds[rows].flatten()) + 0.01 * summary.pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(tuple(scores.shape), loss.item())
