# SPDX-License-Identifier: Apache-2.0
"""A discriminator that looks at its whole batch (minibatch standard deviation), a generator with pixel norm."""
import torch
from torch import nn


class MinibatchStd(nn.Module):
    def forward(self, x):
        s = x.std(0, unbiased=False).mean().expand(x.size(0), 1, *x.shape[2:])
        return torch.cat([x, s], 1)


class PixelNorm(nn.Module):
    def forward(self, x):
        return x / x.pow(2).mean(1, keepdim=True).add(1e-8).sqrt()


D = nn.Sequential(
    nn.Conv2d(1, 4, 3, padding=1), nn.LeakyReLU(0.2), nn.AvgPool2d(2), MinibatchStd(), nn.Conv2d(5, 4, 3), nn.LeakyReLU(0.2), nn.Flatten(), nn.LazyLinear(1)
).double()
G = nn.Sequential(nn.Linear(4, 36), PixelNorm(), nn.Unflatten(1, (4, 3, 3)), nn.Upsample(scale_factor=2), nn.Conv2d(4, 1, 3, padding=1)).double()
torch.manual_seed(0)
for m in [*D.modules(), *G.modules()]:
    if isinstance(m, (nn.Conv2d, nn.Linear)) and not isinstance(m, nn.LazyLinear):
        m.reset_parameters()
D(torch.zeros(2, 1, 6, 6).double())
D[-1].reset_parameters()
ema_G = torch.optim.swa_utils.AveragedModel(G, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
optD, optG = (torch.optim.Adam(m.parameters(), lr=2e-3, betas=(0.0, 0.99)) for m in (D, G))
for it in range(6):
    real = torch.rand(10, 1, 6, 6).double().round()
    fake = G(torch.randn(10, 4).double())
    real.requires_grad_()
    d_real = D(real)
    (g,) = torch.autograd.grad(d_real.sum(), real, create_graph=True)
    r1 = g.pow(2).sum((1, 2, 3)).mean()
    lossD = nn.functional.softplus(D(fake.detach())).mean() + nn.functional.softplus(-d_real).mean() + 5 * r1
    optD.zero_grad()
    lossD.backward()
    optD.step()
    lossG = nn.functional.softplus(-D(fake)).mean()
    optG.zero_grad()
    lossG.backward()
    optG.step()
    ema_G.update_parameters(G)
    print(it, f"{lossD.item():.12g} {lossG.item():.12g} r1 {r1.item():.12g}")
with torch.no_grad():
    print(ema_G(torch.ones(3, 4).double()).mean().item())
