# SPDX-License-Identifier: Apache-2.0
"""AdamW with three parameter groups, layer-wise learning rates and linear warm-up."""
import math

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR


def get_cosine_schedule_with_warmup(optimizer, num_warmup_steps, num_training_steps):
    def lr_lambda(step):
        if step < num_warmup_steps:
            return step / max(1, num_warmup_steps)
        progress = (step - num_warmup_steps) / max(1, num_training_steps - num_warmup_steps)
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))

    return LambdaLR(optimizer, lr_lambda)


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(7, 16)
        self.blocks = nn.ModuleList([nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU()) for _ in range(3)])
        self.head = nn.Linear(16, 1)

    def forward(self, x):
        x = self.embed(x)
        for b in self.blocks:
            x = x + b(x)
        return self.head(x).squeeze(-1)


def main(seed: int = 13, steps: int = 24, batch_size: int = 19) -> None:
    torch.manual_seed(seed)
    torch.set_default_dtype(torch.float64)
    model = Regressor()
    no_decay = ["bias", "norm"]
    groups = [
        {"params": [p for n, p in model.blocks.named_parameters() if p.ndim > 1], "weight_decay": 0.05, "lr": 1e-2},
        {"params": [p for n, p in model.blocks.named_parameters() if p.ndim == 1], "weight_decay": 0.0, "lr": 1e-2},
        {"params": list(model.embed.parameters()) + list(model.head.parameters()), "lr": 3e-2, "weight_decay": 0.01},
    ]
    optimizer = torch.optim.AdamW(groups)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 4, steps)
    w = torch.randn(7)
    for step in range(steps):
        x = torch.randn(batch_size, 7)
        y = torch.sin(x @ w) + x[:, 0]
        loss = nn.functional.smooth_l1_loss(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % 6 == 5:
            print({"step": step, "loss": loss.item(), "lr": scheduler.get_last_lr(), "skipped": no_decay})


if __name__ == "__main__":
    main()
