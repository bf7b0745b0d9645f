# SPDX-License-Identifier: Apache-2.0
"""Online training on one long sequence (batch of one): blocks whose last layer starts at zero, warm-up from lr = 0."""
import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(38)


class Mixer(nn.Module):
    def __init__(self, d=8):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.mix = nn.Conv1d(d, d, 3, padding=1)
        self.proj = nn.Linear(d, d)
        nn.init.zeros_(self.proj.weight)
        nn.init.zeros_(self.proj.bias)

    def forward(self, x):
        h = self.mix(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return x + self.proj(torch.relu(h))


model = nn.Sequential(nn.Linear(2, 8), Mixer(), Mixer(), nn.Linear(8, 1))
opt = torch.optim.Adam(model.parameters(), lr=0.02)
warmup = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: min(1.0, step // 3 / 2))
signal = torch.randn(1, 120, 2)
target = (signal[..., :1].roll(1, 1) + signal[..., 1:].roll(-1, 1)).tanh()
for step in range(8):
    part = slice(12 * step, 12 * step + 12)
    loss = nn.functional.mse_loss(model(signal[:, part]), target[:, part])
    opt.zero_grad()
    loss.backward()
    opt.step()
    warmup.step()
    print(step, loss.item(), warmup.get_last_lr()[0])
