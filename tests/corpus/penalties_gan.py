# SPDX-License-Identifier: Apache-2.0
"""A GAN with R1 penalty on true samples, gradients between two models, an averaged generator, its own loops of steps."""
import copy

import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(241)
generator = nn.Sequential(nn.Linear(3, 16), nn.LeakyReLU(0.2), nn.Linear(16, 2))
critic = nn.Sequential(nn.Linear(2, 16), nn.Softplus(), nn.Linear(16, 16), nn.Softplus(), nn.Linear(16, 1))
averaged = copy.deepcopy(generator).requires_grad_(False)
opt_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.0, 0.99))
opt_d = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.0, 0.99))
angle = torch.rand(80) * 6.28
true = torch.stack([angle.cos(), angle.sin()], 1)
for step in range(9):
    critic.requires_grad_(True)
    for _ in range(2):
        rows = torch.randperm(80)[:13]
        fake = generator(torch.randn(13, 3)).detach()
        real = true[rows].requires_grad_(True)
        score = critic(real)
        loss_d = nn.functional.softplus(-score).mean() + nn.functional.softplus(critic(fake)).mean()
        penalty = torch.zeros(())
        if step % 3 == 0:
            (grad,) = torch.autograd.grad(score.sum(), real, create_graph=True)
            penalty = grad.square().sum(1).mean()
        opt_d.zero_grad(set_to_none=True)
        (loss_d + 5 * penalty).backward()
        opt_d.step()
    critic.requires_grad_(False)
    noise = torch.randn(13, 3, requires_grad=True)
    fake = generator(noise)
    loss_g = nn.functional.softplus(-critic(fake)).mean()
    if step % 4 == 2:  # path length, as in StyleGAN2
        (path,) = torch.autograd.grad((fake * torch.randn_like(fake)).sum(), noise, create_graph=True)
        loss_g = loss_g + 0.1 * (path.norm(dim=1) - 1).square().mean()
    opt_g.zero_grad(set_to_none=True)
    loss_g.backward()
    opt_g.step()
    for a, p in zip(averaged.parameters(), generator.parameters()):
        a.lerp_(p.detach(), 0.3)
    print(step, loss_d.item(), penalty.item(), loss_g.item(), noise.grad.norm().item())
with torch.no_grad():
    fixed = torch.randn(10, 3)
    print(generator(fixed).norm(dim=1).mean().item(), averaged(fixed).norm(dim=1).mean().item())
torch.save({"g": generator, "d": critic.state_dict(), "a": averaged.state_dict()}, "gan.pt")
