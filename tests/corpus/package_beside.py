# SPDX-License-Identifier: Apache-2.0
"""The model, the data and the settings come from modules next to the script; one of them is imported late."""
import importlib
import runpy
import sys
from pathlib import Path

import torch

import settings
from shapes import data
from shapes.nets import build
from shapes.nets.layers import Scaled

torch.set_default_dtype(torch.float64)
torch.manual_seed(settings.SEED)


def main(epochs):
    x, y = data.circles(settings.SAMPLES)
    model = build(settings.WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.RATE)
    for epoch in range(epochs):
        settings.GAIN = 1 + 0.5 * epoch
        for step, rows in enumerate(torch.randperm(len(x)).split(settings.BATCH)):
            if step == 2:
                Scaled.power += 1
            if epoch == 2 and step == 3:
                layers = importlib.import_module("shapes.nets.layers")
                layers.bend = torch.sin
            loss = torch.nn.functional.binary_cross_entropy_with_logits(model(x[rows])[:, 0], y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(epoch, settings.GAIN, Scaled.power, loss.item())
    return model, x, y


if __name__ == "__main__":
    model, x, y = main(3)
    from shapes import report

    report.write(model, x, y, Path("out") / "report.json")
    print(Path(sys.argv[0]).name, Path(__file__).name, __name__, Path(data.__file__).parent.name)
    print(runpy.run_path("settings.py")["SEED"], (Path("out") / "report.json").exists())
