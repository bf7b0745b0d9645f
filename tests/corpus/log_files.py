# SPDX-License-Identifier: Apache-2.0
import csv
import json
import logging
import os

import torch

SAVE = "output"
os.makedirs(SAVE, exist_ok=True)
logging.basicConfig(
    filename=os.path.join(SAVE, "train.log"),
    filemode="w",
    level=logging.DEBUG,
    format="%(asctime)s %(levelname)-8s %(name)s: %(message)s",
)
logger = logging.getLogger(__name__)
cfg = {"seed": 10, "lr": 0.05, "epochs": 3, "batch": 9, "widths": [3, 10, 1]}
with open(os.path.join(SAVE, "config.json"), "w") as f:
    json.dump(cfg, f, indent=2)
torch.manual_seed(cfg["seed"])
torch.set_default_dtype(torch.float64)
layers = []
for a, b in zip(cfg["widths"], cfg["widths"][1:]):
    layers += [torch.nn.Linear(a, b), torch.nn.Tanh()]
model = torch.nn.Sequential(*layers[:-1])
logger.info("model: %s", model)
optimizer = torch.optim.SGD(model.parameters(), lr=cfg["lr"])
x = torch.rand(40, 3)
y = x.sum(1, keepdim=True).sin()
history = []
with open(f"{SAVE}/metrics.csv", "w", newline="") as f:
    writer = csv.DictWriter(f, fieldnames=["epoch", "loss", "mae"])
    writer.writeheader()
    for epoch in range(cfg["epochs"]):
        total = 0.0
        for i in range(0, len(x), cfg["batch"]):
            pred = model(x[i : i + cfg["batch"]])
            loss = torch.nn.functional.mse_loss(pred, y[i : i + cfg["batch"]])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * pred.size(0)
            logger.debug("step %d loss %.15g", i, loss.item())
        with torch.no_grad():
            mae = (model(x) - y).abs().mean().item()
        writer.writerow({"epoch": epoch, "loss": total / len(x), "mae": mae})
        f.flush()
        logger.info("epoch %d done", epoch)
        history.append({"epoch": epoch, "train": {"loss": total / len(x)}, "mae": mae})
with open(f"{SAVE}/history.jsonl", "a") as f:
    for h in history:
        f.write(json.dumps(h) + "\n")
print(f"wrote {sorted(os.listdir(SAVE))}")
