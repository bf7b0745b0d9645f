# SPDX-License-Identifier: Apache-2.0
"""The folder of a run has the time in its name, to the microsecond."""
import logging
from datetime import datetime
from pathlib import Path

import torch

run = Path("results") / datetime.now().strftime("%Y%m%d-%H%M%S-%f")
run.mkdir(parents=True)
logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", handlers=[logging.FileHandler(run / "run.log")])
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
best = float("inf")
for epoch in range(5):
    x = torch.randn(12, 4)
    loss = (model(x) - x[:, :2]).pow(2).mean()
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.3 * p.grad
    logging.info("epoch %d loss %.12g", epoch, loss.item())
    if loss.item() < best:
        best = loss.item()
        torch.save(model.state_dict(), run / "best.pt")
    torch.save(model, run / f"{datetime.now():%Y%m%d_%H%M%S_%f}.pt")
model.load_state_dict(torch.load(run / "best.pt"))
print(best, sum(p.sum().item() for p in model.parameters()), len(list(run.iterdir())), len(list(run.parent.iterdir())))
print(len((run / "run.log").read_text().splitlines()), torch.load(max(run.glob("*_*.pt")), weights_only=False)(x).sum().item())
