# SPDX-License-Identifier: Apache-2.0
"""One nested dictionary holds all settings; parts of it are read in forward() and edited between epochs."""
import copy
import json

import torch
from torch import nn

CONFIG = {
    "seed": 31,
    "model": {"hidden": 12, "residual": True, "noise": 0.0, "gains": [1.0, 1.0]},
    "train": {"lr": 0.03, "batch": 12, "epochs": 5},
}


class Net(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.inp = nn.Linear(3, cfg["hidden"])
        self.mid = nn.Linear(cfg["hidden"], cfg["hidden"])
        self.out = nn.Linear(cfg["hidden"], 1)

    def forward(self, x):
        h = self.inp(x).relu() * self.cfg["gains"][0]
        m = self.mid(h).relu() * self.cfg["gains"][1]
        if self.training and CONFIG["model"]["noise"]:
            m = m + CONFIG["model"]["noise"] * torch.randn_like(m)
        return self.out(h + m if self.cfg["residual"] else m)


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(CONFIG["seed"])
    model = Net(CONFIG["model"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=CONFIG["train"]["lr"])
    x = torch.rand(65, 3)
    y = (3 * x).sin().prod(1, keepdim=True)
    log = []
    for epoch in range(CONFIG["train"]["epochs"]):
        if epoch == 1:
            CONFIG["model"]["gains"][1] = 0.5
        if epoch == 2:
            CONFIG["model"].update(noise=0.1)
        if epoch == 3:
            CONFIG["model"]["residual"] = False
        if epoch == 4:
            CONFIG["model"]["gains"] = [2.0, 0.25]
            del CONFIG["model"]["noise"]
            CONFIG["model"].setdefault("noise", 0.0)
        for xb, yb in zip(x.split(CONFIG["train"]["batch"]), y.split(CONFIG["train"]["batch"])):
            loss = nn.functional.mse_loss(model(xb), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        log.append({"epoch": epoch, "loss": loss.item(), "config": copy.deepcopy(CONFIG["model"])})
        print(epoch, loss.item())
    with open("log.json", "w") as f:
        json.dump(log, f, indent=1)
