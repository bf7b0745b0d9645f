# SPDX-License-Identifier: Apache-2.0
"""VQ-VAE: the codebook is a buffer that each training call updates from its whole batch."""
import torch
import torch.nn.functional as F
from torch import nn


class VectorQuantizerEMA(nn.Module):
    def __init__(self, num_embeddings, dim, decay=0.9, eps=1e-5):
        super().__init__()
        self.decay, self.eps = decay, eps
        self.register_buffer("embedding", torch.randn(num_embeddings, dim))
        self.register_buffer("cluster_size", torch.ones(num_embeddings))
        self.register_buffer("embed_avg", self.embedding.clone())

    def forward(self, z):
        d = torch.cdist(z, self.embedding)
        idx = d.argmin(1)
        onehot = F.one_hot(idx, len(self.embedding)).to(z.dtype)
        q = onehot @ self.embedding
        if self.training:
            with torch.no_grad():
                self.cluster_size.mul_(self.decay).add_(onehot.sum(0), alpha=1 - self.decay)
                self.embed_avg.mul_(self.decay).add_(onehot.t() @ z, alpha=1 - self.decay)
                n = self.cluster_size.sum()
                size = (self.cluster_size + self.eps) / (n + len(self.embedding) * self.eps) * n
                self.embedding.copy_(self.embed_avg / size.unsqueeze(1))
        loss = 0.25 * F.mse_loss(q.detach(), z)
        p = onehot.mean(0)
        perplexity = torch.exp(-(p * (p + 1e-10).log()).sum())
        return z + (q - z).detach(), loss, perplexity


class VQVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(9, 16), nn.ReLU(), nn.Linear(16, 3))
        self.vq = VectorQuantizerEMA(6, 3)
        self.decoder = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 9))

    def forward(self, x):
        q, loss, perplexity = self.vq(self.encoder(x))
        return self.decoder(q), loss, perplexity


torch.set_default_dtype(torch.float64)
torch.manual_seed(28)
model = VQVAE()
opt = torch.optim.Adam(model.parameters(), lr=5e-3)
data = torch.randn(4, 9)[torch.randint(0, 4, (50,))] + 0.2 * torch.randn(50, 9)
for epoch in range(3):
    for x in data[torch.randperm(50)].split(11):
        recon, vq_loss, perplexity = model(x)
        loss = F.mse_loss(recon, x) + vq_loss
        opt.zero_grad()
        loss.backward()
        opt.step()
    print("epoch", epoch, "recon+vq", loss.item(), "perplexity", perplexity.item())
torch.save(model.state_dict(), "vqvae.pt")
