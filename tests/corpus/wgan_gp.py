# SPDX-License-Identifier: Apache-2.0
import torch
from torch import autograd, nn


class Gen(nn.Module):
    def __init__(self, dim=12):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, dim), nn.ReLU(), nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, 2))

    def forward(self, noise):
        return self.net(noise)


class Critic(nn.Module):
    def __init__(self, dim=12):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, dim), nn.Tanh(), nn.Linear(dim, dim), nn.Tanh(), nn.Linear(dim, 1))

    def forward(self, x):
        return self.net(x).view(-1)


def eight_gaussians(batch):
    while True:
        angle = torch.randint(0, 8, (batch,)) * (torch.pi / 4)
        yield torch.stack([angle.cos(), angle.sin()], 1) + 0.02 * torch.randn(batch, 2)


def calc_gradient_penalty(netD, real_data, fake_data, lam=0.1):
    alpha = torch.rand(real_data.size(0), 1).expand(real_data.size())
    interpolates = alpha * real_data + (1 - alpha) * fake_data
    interpolates.requires_grad_(True)
    disc_interpolates = netD(interpolates)
    gradients = autograd.grad(
        outputs=disc_interpolates,
        inputs=interpolates,
        grad_outputs=torch.ones_like(disc_interpolates),
        create_graph=True,
        retain_graph=True,
        only_inputs=True,
    )[0]
    return ((gradients.norm(2, dim=1) - 1) ** 2).mean() * lam


torch.manual_seed(4)
torch.set_default_dtype(torch.float64)
netG, netD = Gen(), Critic()
optD = torch.optim.Adam(netD.parameters(), lr=1e-3, betas=(0.5, 0.9))
optG = torch.optim.Adam(netG.parameters(), lr=1e-3, betas=(0.5, 0.9))
data = eight_gaussians(17)
for iteration in range(5):
    for p in netD.parameters():
        p.requires_grad = True
    for _ in range(3):
        real = next(data)
        netD.zero_grad()
        D_real = netD(real).mean()
        with torch.no_grad():
            fake = netG(torch.randn(17, 2))
        D_fake = netD(fake).mean()
        gp = calc_gradient_penalty(netD, real, fake)
        D_cost = D_fake - D_real + gp
        D_cost.backward()
        optD.step()
    for p in netD.parameters():
        p.requires_grad = False
    netG.zero_grad()
    G_cost = -netD(netG(torch.randn(17, 2))).mean()
    G_cost.backward()
    optG.step()
    print(f"iter {iteration} D {D_cost.item():.12g} GP {gp.item():.12g} W {(D_real - D_fake).item():.12g} G {G_cost.item():.12g}")
