# SPDX-License-Identifier: Apache-2.0
"""Perceptual loss of features that a frozen network keeps on itself."""
import torch
import torch.nn as nn


class Extractor(nn.Module):
    def __init__(self):
        super().__init__()
        self.slice1 = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.ReLU())
        self.slice2 = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(3, 5, 3, padding=1), nn.ReLU())
        for p in self.parameters():
            p.requires_grad = False
        self.feats = []

    def forward(self, x):
        self.feats = []
        x = self.slice1(x)
        self.feats.append(x)
        x = self.slice2(x)
        self.feats.append(x)
        return x


class Refiner(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(1, 6, 3, padding=1)
        self.b = nn.Conv2d(6, 1, 3, padding=1)

    def forward(self, x):
        self.hidden = torch.relu(self.a(x))
        return x + self.b(self.hidden)


def gram(f):
    b, c, h, w = f.shape
    f = f.view(b, c, h * w)
    return f @ f.transpose(1, 2) / (c * h * w)


torch.set_default_dtype(torch.float64)
torch.manual_seed(27)
clean = torch.rand(22, 1, 6, 6).round()
noisy = clean + 0.3 * torch.randn_like(clean)
extractor, refiner = Extractor(), Refiner()
opt = torch.optim.Adam(refiner.parameters(), lr=0.01)
for epoch in range(2):
    for c, n in zip(clean.split(5), noisy.split(5)):
        out = refiner(n)
        extractor(c)
        targets = [f.detach() for f in extractor.feats]
        extractor(out)
        content = sum(nn.functional.mse_loss(a, b) for a, b in zip(extractor.feats, targets))
        style = sum(nn.functional.mse_loss(gram(a), gram(b)) for a, b in zip(extractor.feats, targets))
        sparsity = refiner.hidden.abs().mean()
        loss = content + style + 0.01 * sparsity
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(epoch, "content", content.item(), "style", style.item(), "sparsity", sparsity.item())
