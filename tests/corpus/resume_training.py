# SPDX-License-Identifier: Apache-2.0
"""Train two epochs and save; start once more from the checkpoint, as after a crash."""
import os

import torch
from torch import nn

CKPT = "runs/last.pth"


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Dropout(0.2), nn.ReLU(), nn.Linear(12, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    return model, optimizer, scheduler


def fit(num_epochs, x, y):
    model, optimizer, scheduler = build()
    start = 0
    if os.path.isfile(CKPT):
        print(f"=> loading checkpoint '{CKPT}'")
        checkpoint = torch.load(CKPT)
        start = checkpoint["epoch"]
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        torch.set_rng_state(checkpoint["rng"])
    else:
        print(f"=> no checkpoint found at '{CKPT}'")
        os.makedirs(os.path.dirname(CKPT), exist_ok=True)
    for epoch in range(start, num_epochs):
        order = torch.randperm(len(x))
        for part in order.chunk(5):
            loss = nn.functional.cross_entropy(model(x[part]), y[part])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()
        print("epoch", epoch, "loss", loss.item(), "lr", scheduler.get_last_lr())
        torch.save(
            {
                "epoch": epoch + 1,
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
                "rng": torch.get_rng_state(),
            },
            CKPT,
        )
    return model


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)
    x = torch.randn(43, 6)
    y = (x[:, 0] * x[:, 1] > 0).long()
    fit(2, x, y)
    model = fit(4, x, y)
    print(sum(p.abs().sum().item() for p in model.parameters()))
