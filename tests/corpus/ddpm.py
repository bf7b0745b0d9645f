# SPDX-License-Identifier: Apache-2.0
"""Denoising diffusion on two-dimensional points."""
import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class SinusoidalEmbedding(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, t):
        half = self.dim // 2
        freqs = torch.exp(-math.log(10000.0) * torch.arange(half) / (half - 1))
        args = t[:, None].to(freqs.dtype) * freqs[None]
        return torch.cat([args.sin(), args.cos()], dim=-1)


class Denoiser(nn.Module):
    def __init__(self, hidden=32, emb=8):
        super().__init__()
        self.time = nn.Sequential(SinusoidalEmbedding(emb), nn.Linear(emb, hidden), nn.SiLU())
        self.inp = nn.Linear(2, hidden)
        self.mid = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, 2)

    def forward(self, x, t):
        h = F.silu(self.inp(x) + self.time(t))
        return self.out(F.silu(self.mid(h)))


class GaussianDiffusion:
    def __init__(self, T):
        self.T = T
        self.betas = torch.linspace(1e-3, 0.2, T)
        self.alphas = 1 - self.betas
        self.alpha_bars = self.alphas.cumprod(0)

    def q_sample(self, x0, t, noise):
        ab = self.alpha_bars[t].unsqueeze(1)
        return ab.sqrt() * x0 + (1 - ab).sqrt() * noise

    @torch.no_grad()
    def sample(self, model, n):
        x = torch.randn(n, 2)
        for t in reversed(range(self.T)):
            eps = model(x, torch.full((n,), t))
            x = (x - self.betas[t] / (1 - self.alpha_bars[t]).sqrt() * eps) / self.alphas[t].sqrt()
            if t > 0:
                x += self.betas[t].sqrt() * torch.randn_like(x)
        return x


def main():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(123)
    diffusion = GaussianDiffusion(10)
    model = Denoiser()
    ema = copy.deepcopy(model).requires_grad_(False)
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3)
    x0_all = torch.randn(90, 2) * 0.1 + torch.tensor([[1.0, -1.0]]) * torch.randint(0, 2, (90, 1))
    for epoch in range(3):
        total = 0.0
        for x0 in x0_all[torch.randperm(90)].split(20):
            t = torch.randint(0, diffusion.T, (x0.shape[0],))
            noise = torch.randn_like(x0)
            loss = F.mse_loss(model(diffusion.q_sample(x0, t, noise), t), noise)
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            for a, b in zip(ema.parameters(), model.parameters()):
                a.lerp_(b, 0.1)
            total += loss.item() * x0.shape[0]
        print(f"epoch {epoch:02d} | loss {total / 90:.12g}")
    s = diffusion.sample(ema, 7)
    print("samples:", [[round(v, 9) for v in row] for row in s.tolist()])


if __name__ == "__main__":
    main()
