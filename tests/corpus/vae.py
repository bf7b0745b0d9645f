# SPDX-License-Identifier: Apache-2.0
"""Variational autoencoder; the loop itself calls encode() and decode()."""
import torch
from torch import nn
from torch.nn import functional as F


class VAE(nn.Module):
    def __init__(self, n_in=36, n_hidden=20, n_latent=3):
        super().__init__()
        self.fc1 = nn.Linear(n_in, n_hidden)
        self.fc21 = nn.Linear(n_hidden, n_latent)
        self.fc22 = nn.Linear(n_hidden, n_latent)
        self.fc3 = nn.Linear(n_latent, n_hidden)
        self.fc4 = nn.Linear(n_hidden, n_in)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        eps = torch.randn_like(std)
        return mu + eps * std

    def decode(self, z):
        h3 = F.relu(self.fc3(z))
        return torch.sigmoid(self.fc4(h3))


def loss_function(recon_x, x, mu, logvar):
    BCE = F.binary_cross_entropy(recon_x, x, reduction="sum")
    KLD = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return BCE, KLD


def make_images(n):
    corner = torch.randint(0, 3, (n, 2))
    img = torch.zeros(n, 6, 6)
    for i, (a, b) in enumerate(corner.tolist()):
        img[i, a : a + 3, b : b + 3] = 1.0
    return img.view(n, -1)


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)
    data = make_images(70)
    loader = torch.utils.data.DataLoader(data, batch_size=11, shuffle=True)
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(1, 4):
        bce_total, kld_total = 0.0, 0.0
        for x in loader:
            mu, logvar = model.encode(x)
            z = model.reparameterize(mu, logvar)
            recon = model.decode(z)
            bce, kld = loss_function(recon, x, mu, logvar)
            optimizer.zero_grad()
            (bce + kld).backward()
            optimizer.step()
            bce_total += bce.item()
            kld_total += kld.item()
        print(f"epoch {epoch}: bce/sample={bce_total / len(data):.12g}, kld/sample={kld_total / len(data):.12g}")
    with torch.no_grad():
        sample = model.decode(torch.randn(5, 3))
    torch.save(sample, "sample.pt")
    print("mean pixel of samples", sample.mean().item())
