# SPDX-License-Identifier: Apache-2.0
"""ResNet-50 in two parts: on two devices of one process, and on two ranks as a pipeline; both against one device.

rankwise run -n 2 examples/resnet50_model_parallel.py --small
rankwise run -n 2 examples/resnet50_model_parallel.py --small --plot times.png --schedule schedule.svg

The same model, data and steps each time: the losses and the final parameters are those of one device, or the exit
code is 1. The second command also draws the pipeline's time per step for 1 to 8 micro-batches, and one step. Images
and labels are drawn at random. BatchNorm uses its stored statistics, since those of a micro-batch are not those of
the batch; --norm group trains without.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

import rankwise as rw

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_CLASSES = 1000
TOLERANCES = {"float64": 1e-10, "float32": 1e-3}


def normalisation(kind: str, channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels) if kind == "batch" else nn.GroupNorm(4, channels)


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions, and the input added to what they make of it."""

    def __init__(self, inputs: int, width: int, stride: int, norm: str) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.norm1 = normalisation(norm, width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.norm2 = normalisation(norm, width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.norm3 = normalisation(norm, outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), normalisation(norm, outputs)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.relu(self.norm1(self.conv1(x)))
        h = self.relu(self.norm2(self.conv2(h)))
        return self.relu(self.norm3(self.conv3(h)) + self.shortcut(x))


class ResNet50(nn.Module):
    """He et al., "Deep Residual Learning for Image Recognition" (2016), table 1."""

    def __init__(self, width: int = 64, norm: str = "batch") -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.norm1 = normalisation(norm, width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        inputs = width
        for number, depth in enumerate([3, 4, 6, 3]):
            own_width = width * 2**number
            blocks = []
            for index in range(depth):
                blocks.append(Bottleneck(inputs, own_width, 2 if number and index == 0 else 1, norm))
                inputs = 4 * own_width
            setattr(self, f"layer{number + 1}", nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inputs, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(self.relu(self.norm1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.avgpool(x).flatten(1))


def built(options: argparse.Namespace, device: str) -> ResNet50:
    """Return the same model each time."""
    torch.manual_seed(0)
    # What eval changes in this model is that BatchNorm uses its stored statistics.
    return ResNet50(options.width, options.norm).eval().to(device, getattr(torch, options.dtype))


def batches(options: argparse.Namespace, device: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return images [batch, 3, size, size] and one-hot labels [batch, NUM_CLASSES]."""
    generator = torch.Generator().manual_seed(1)
    dtype = getattr(torch, options.dtype)
    found = []
    for _ in range(options.steps):
        images = torch.randn(options.batch_size, 3, options.size, options.size, generator=generator)
        labels = torch.randint(0, NUM_CLASSES, (options.batch_size,), generator=generator)
        one_hot = nn.functional.one_hot(labels, NUM_CLASSES)
        found.append((images.to(device, dtype), one_hot.to(device, dtype)))
    return found


def train(
    model: nn.Module,
    step: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    data: list[tuple[torch.Tensor, torch.Tensor]],
) -> tuple[list[float], float]:
    """Return the loss of each step, and the seconds of the fastest."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses, times = [], []
    for x, y in data:
        started = time.perf_counter()
        losses.append(step(x, y).item())
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - started)
    return losses, min(times)


def in_one_process(model: nn.Module) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        output = model(x)
        loss = nn.functional.mse_loss(output, y.to(output.device))
        loss.backward()
        return loss.detach()

    return step


def difference(model: nn.Module, one: nn.Module) -> float:
    """Return the largest difference of a parameter from that on one device, relative to its largest value."""
    expected = dict(one.named_parameters())
    own = 0.0
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:  # on another rank
            wanted = expected[name].detach().cpu()
            own = max(own, float((parameter.detach().cpu() - wanted).abs().max() / wanted.abs().max()))
    return rw.all_reduce(own, "max")


def placed(model: nn.Module, folder: str) -> str:
    """Put layer3 and what follows on a second device; return which."""
    first, second = ("cuda:0", "cuda:1") if torch.cuda.device_count() > 1 else ("cpu", "disk")
    behind = dict.fromkeys(["layer3", "layer4", "avgpool", "fc"], second)
    rw.place(model, {"": first, **behind}, offload_folder=folder)
    return f"{first} and {second}"


def plot(seconds: dict[int, float], path: Path) -> None:
    from matplotlib.figure import Figure  # noqa: PLC0415 - only where a picture is wanted

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(list(seconds), list(seconds.values()), marker="o")
    axes.set_xlabel("micro-batches")
    axes.set_ylabel("seconds per step")
    axes.set_ylim(bottom=0)
    figure.savefig(path, dpi=150)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--small", action="store_true", help="32x32 images, batches of 8, 2 steps, an eighth of the width"
    )
    parser.add_argument("--size", type=int, help="of an image; default 128")
    parser.add_argument("--batch-size", type=int, help="default 120")
    parser.add_argument("--steps", type=int, help="default 3")
    parser.add_argument("--width", type=int, help="channels of the first layer; default 64")
    parser.add_argument("--norm", choices=["batch", "group"], default="batch")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float64")
    parser.add_argument("--micro-batches", type=int, default=8, help="the most to try")
    parser.add_argument("--plot", type=Path, help="picture of the time against micro-batches, as .png or .svg")
    parser.add_argument("--schedule", type=Path, help="picture of one step, as .svg")
    options = parser.parse_args()
    usual, small = {"size": 128, "batch_size": 120, "steps": 3, "width": 64}, (32, 8, 2, 8)
    for (name, value), smaller in zip(usual.items(), small, strict=True):
        if getattr(options, name) is None:
            setattr(options, name, smaller if options.small else value)

    with rw.join() as world, tempfile.TemporaryDirectory() as folder:
        data = batches(options, world.device)
        one = built(options, world.device)
        losses, seconds = train(one, in_one_process(one), data)
        rw.print(f"one device           losses {losses}   {seconds:.3f} s per step")

        model = built(options, "cpu")
        where = placed(model, folder)
        losses, seconds = train(model, in_one_process(model), data)
        rw.print(f"placed               losses {losses}   {seconds:.3f} s per step, on {where}")
        largest = difference(model, one)
        rw.print(f"                     largest difference {largest:.1e}")

        times = {}
        for count in range(1, options.micro_batches + 1):
            model = built(options, world.device)
            split = ["layer3"] if world.world_size == 2 else None
            step = rw.pipeline(model, nn.functional.mse_loss, example=data[0][0], micro_batches=count, split=split)
            losses, times[count] = train(model, step, data)
            what = "micro-batches" if count > 1 else "micro-batch"
            rw.print(f"{count} {what:<18} losses {losses}   {times[count]:.3f} s per step")
            from_one = difference(model, one)
            rw.print(f"                     largest difference {from_one:.1e}")
            largest = max(largest, from_one)
        if options.schedule:
            with step.measure():
                step(*data[0])
            step.draw(options.schedule)
        if options.plot and world.rank == 0:
            plot(times, options.plot)
    return int(not largest <= TOLERANCES[options.dtype])


if __name__ == "__main__":
    sys.exit(main())
