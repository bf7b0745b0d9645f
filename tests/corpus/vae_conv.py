# SPDX-License-Identifier: Apache-2.0
from __future__ import print_function

import argparse

import torch
import torch.nn as nn

parser = argparse.ArgumentParser(description="VAE Example")
parser.add_argument("--batch-size", type=int, default=9, metavar="N")
parser.add_argument("--epochs", type=int, default=2, metavar="N")
parser.add_argument("--log-interval", type=int, default=2)
args = parser.parse_args()
torch.manual_seed(2)
torch.set_default_dtype(torch.float64)


class ConvVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Conv2d(1, 4, 3, 2, 1), nn.ReLU(), nn.Conv2d(4, 8, 3, 2, 1), nn.ReLU(), nn.Flatten())
        self.mu = nn.Linear(32, 2)
        self.logvar = nn.Linear(32, 2)
        self.dec = nn.Sequential(
            nn.Linear(2, 32),
            nn.Unflatten(1, (8, 2, 2)),
            nn.ReLU(),
            nn.ConvTranspose2d(8, 4, 4, 2, 1),
            nn.ReLU(),
            nn.ConvTranspose2d(4, 1, 4, 2, 1),
        )

    def forward(self, x):
        h = self.enc(x)
        mu, logvar = self.mu(h), self.logvar(h)
        # the noise is drawn inside of the model
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp() if self.training else mu
        return self.dec(z), mu, logvar


model = ConvVAE()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
x_train = (torch.rand(40, 1, 1, 1) < 0.5).double() * torch.ones(40, 1, 8, 8) + 0.1 * torch.randn(40, 1, 8, 8)
x_test = x_train[:15].flip(2)
train_loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x_train), args.batch_size, shuffle=True)
test_loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x_test), args.batch_size)


def loss_function(recon, x, mu, logvar):
    return ((recon - x) ** 2).sum() - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


def train(epoch):
    model.train()
    train_loss = 0
    for batch_idx, (data,) in enumerate(train_loader):
        optimizer.zero_grad()
        recon_batch, mu, logvar = model(data)
        loss = loss_function(recon_batch, data, mu, logvar)
        loss.backward()
        train_loss += loss.item()
        optimizer.step()
        if batch_idx % args.log_interval == 0:
            print("Train Epoch: {} [{}/{}]\tLoss: {!r}".format(
                epoch, batch_idx * len(data), len(train_loader.dataset), loss.item() / len(data)))
    print("====> Epoch: {} Average loss: {:.10f}".format(epoch, train_loss / len(train_loader.dataset)))


def test(epoch):
    model.eval()
    test_loss = 0
    with torch.no_grad():
        for (data,) in test_loader:
            recon, mu, logvar = model(data)
            test_loss += loss_function(recon, data, mu, logvar).item()
    print("====> Test set loss: {:.10f}".format(test_loss / len(test_loader.dataset)))


for epoch in range(1, args.epochs + 1):
    train(epoch)
    test(epoch)
