# SPDX-License-Identifier: Apache-2.0
"""Lesson 4 of the course: what is averaged over ranks, and how. Prints the same on one rank and on two.

rankwise run -n 1 examples/lesson4_averages.py
rankwise run -n 2 examples/lesson4_averages.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from curve import draw
from torch import nn
from torch.utils.data import TensorDataset

import rankwise as rw

NUM_SAMPLES = 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, help="picture of the plain mean over two ranks with other shares, as .svg")
    options = parser.parse_args()

    torch.manual_seed(0)
    data = TensorDataset(torch.randn(NUM_SAMPLES, 4).double(), torch.arange(NUM_SAMPLES) % 2)
    with rw.join() as world:
        net = nn.Linear(4, 2).double().to(world.device)
        model = rw.replicate(net)
        norm = rw.replicate(nn.BatchNorm1d(4).double().to(world.device), sync_batchnorm=True)
        dropout = rw.replicate(nn.Sequential(nn.Linear(4, 4).double().to(world.device), nn.Dropout(0.5)))
        for x, y in rw.DataLoader(data, global_batch_size=NUM_SAMPLES):  # one batch
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            losses = rw.all_gather_object((loss.item(), len(x)))
            rw.print("loss of each rank:  ", ", ".join(f"{one:.4f} over {count} samples" for one, count in losses))
            rw.print(f"their plain mean:    {sum(one for one, _ in losses) / len(losses):.4f}")
            rw.print(f"loss of the batch:   {rw.mean(loss, len(x)):.4f}")
            with torch.no_grad():
                each = rw.whole_batch(nn.functional.cross_entropy(model(x), y, reduction="none")).cpu()
            if options.plot and world.rank == 0:
                shares = range(1, NUM_SAMPLES)
                plain = [(share, (each[:share].mean() + each[share:].mean()).item() / 2) for share in shares]
                right_mean = [(share, each.mean().item()) for share in shares]
                curves = {"plain mean": plain, "loss of the batch": right_mean}
                title = "The plain mean of two ranks' losses depends on their shares"
                draw(options.plot, curves, x_label="samples of rank 0, of 7", y_label="loss", title=title)
            rw.print(f"norm of gradient:    {net.weight.grad.norm().item():.4f}")

            norm(x)
            seen = (10 * norm.running_mean).tolist()  # a step moves the mean by a tenth
            rw.print(f"mean for BatchNorm: {[round(value, 4) for value in seen]}")

            dropped = (dropout(x) == 0).sum(1)
            rw.print(f"zeros by dropout:    {rw.whole_batch(dropped).tolist()}")

            right = int((model(x).argmax(1) == y).sum())
            rw.print(f"right answers:       {rw.all_reduce(right)} of {rw.all_reduce(len(y))}")


if __name__ == "__main__":
    main()
