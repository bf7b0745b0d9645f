# SPDX-License-Identifier: Apache-2.0
"""Noise is drawn like outputs and gradients of sequence-first and channels-last models, then a dropout of the whole."""
import torch
from torch import nn
from torch.nn import functional as F

torch.set_default_dtype(torch.float64)
torch.manual_seed(46)
lstm = nn.LSTM(5, 7)
conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
for step in range(5):
    x = torch.randn(6, 8, 5, requires_grad=True)
    out, (h, c) = lstm(x)
    noisy = out + 0.1 * torch.randn_like(out)
    dropped = F.dropout(noisy, 0.3) + F.dropout(h, 0.3).sum()
    dropped.square().mean().backward()
    jitter = torch.empty_like(x.grad).uniform_()
    img = torch.randn(9, 3, 6, 6).to(memory_format=torch.channels_last)
    y = conv(img)
    z = y * torch.bernoulli(torch.full_like(y, 0.5)) + torch.rand_like(y)
    print(step, dropped.sum().item(), (jitter * x.grad).sum().item(), z.square().mean().item(), out.is_contiguous())
