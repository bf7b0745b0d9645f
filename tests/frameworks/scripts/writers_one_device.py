# SPDX-License-Identifier: Apache-2.0
"""A script for one device whose files are written by libraries in C++ and by trackers; it reads them again."""

from __future__ import annotations

from pathlib import Path

import cv2
import h5py
import numpy as np
import pyarrow as pa
import tensorboardX
import torch
import wandb
from pyarrow import parquet
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.tensorboard import SummaryWriter

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
model = nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
named_by_time = SummaryWriter()
named = SummaryWriter(log_dir=Path("logs/torch"))
other = tensorboardX.SummaryWriter("logs/x")
run = wandb.init(project="writers", mode="offline", config={"lr": 0.1})
video = cv2.VideoWriter("steps.avi", cv2.VideoWriter_fourcc(*"MJPG"), 5, (64, 32))
losses = []
for step in range(4):
    loss = model(torch.randn(7, 3)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    for writer in (named_by_time, named, other):
        writer.add_scalar("loss", loss.item(), step)
    named.add_histogram("weights", model.weight, step)
    image = (model.weight.detach().abs() * 100).to(torch.uint8).numpy()
    named.add_image("weights", image, step, dataformats="HW")
    wandb.log({"loss": loss.item(), "weights": wandb.Image(image)})
    named.flush()
    video.write(np.full((32, 64, 3), 10 * step, dtype=np.uint8))
video.release()
named.add_hparams({"lr": 0.1}, {"loss": losses[-1]})
for writer in (named_by_time, named, other):
    writer.close()
torch.save(model.state_dict(), f"{named_by_time.log_dir}/best.pt")
torch.save(model.state_dict(), named.log_dir / "best.pt")
torch.save(model.state_dict(), Path(run.dir) / "best.pt")
print(run.config["lr"], len(list(Path("runs").glob("*/best.pt"))))
wandb.finish()

file = h5py.File("weights.h5", "w")
file["weight"] = model.weight.detach().numpy()
file.flush()
with h5py.File("weights.h5", "r") as again:
    print(sorted(again), Path(file.filename).name)
    # Wherever the script runs, not only where it prints.
    assert Path(file.filename).name == "weights.h5"
file.close()
Path(".cache").mkdir()
with h5py.File(".cache/weights.h5", "w", track_order=True) as file:
    file["z"], file["a"] = 1.0, 2.0
    print(list(file))


def leave_open() -> None:
    h5py.File("left.h5", "w")["a"] = 1.0


leave_open()
print(h5py.File("left.h5")["a"][()])
with h5py.File("weights.h5", "a") as file:
    file["bias"] = model.bias.detach().numpy()
    print(sorted(file))
    assert sorted(file) == ["bias", "weight"]
try:
    h5py.File("weights.h5", "x")
except FileExistsError:
    print("exists")
with h5py.File("weights.h5") as file:
    print(file["weight"][:].tolist(), file["bias"][:].tolist())
print(cv2.imwrite("weights.png", image), cv2.imread("weights.png").shape)
frames = cv2.VideoCapture("steps.avi")
print(int(frames.get(cv2.CAP_PROP_FRAME_COUNT)))
for name in ("nowhere/steps.avi", "second.avi"):
    video = cv2.VideoWriter(name, cv2.VideoWriter_fourcc(*"MJPG"), 5, (64, 32))
    if video.isOpened():
        print(name)
        break
video.release()
parquet.write_to_dataset(pa.table({"loss": losses, "part": [0, 0, 1, 1]}), "parts", partition_cols=["part"])
print(parquet.read_table("parts").num_rows)
parquet.write_table(pa.table({"loss": losses}), "losses.parquet")
print(parquet.read_table("losses.parquet").to_pydict())


class Recording(nn.Linear):
    """Records each of its calls, which is to happen once."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        calls.add_scalar("calls", 1.0, 0)
        return super().forward(x)


calls = SummaryWriter("logs/calls")
recording = Recording(3, 2)
for _ in range(5):
    recording(torch.randn(4, 3))
calls.close()
print(len(EventAccumulator("logs/calls").Reload().Scalars("calls")))
# Every rank reads what rank zero wrote; only what differs from one process is compared by the test.
for folder in (named_by_time.log_dir, "logs/torch", "logs/x"):
    events = EventAccumulator(str(folder)).Reload()
    print([(event.step, event.value) for event in events.Scalars("loss")])
