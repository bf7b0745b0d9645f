# SPDX-License-Identifier: Apache-2.0
"""Train a small GPT on Python's own standard library, byte by byte, on worker groups that exchange updates rarely.

    rankwise run -n 2 examples/diloco.py --every 20
    rankwise run --hosts gpu-01,gpu-02 -n 4 examples/diloco.py --every 20
    rankwise run -n 2 examples/diloco.py --every 0

Ranks of a worker group exchange gradients in every step; worker groups exchange the changes of their parameters once in
--every steps, and an outer optimizer (Nesterov) makes one step of it: DiLoCo (arXiv:2311.08105). With --every 0 all
ranks exchange gradients in every step, for comparison.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the usual name

import rankwise as rw

LENGTH = 64
"""Bytes of text that the model sees at once."""
NUM_HELD_OUT = 256
"""Pieces of text that are not trained on."""


class GPT(nn.Module):
    """Three layers of attention, 380 thousand parameters; bytes [batch, length] in, logits [batch, length, 256] out."""

    def __init__(self, width: int = 96, num_layers: int = 3, num_heads: int = 4) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Parameter(torch.zeros(LENGTH, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, num_heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        hidden = self.bytes(x) + self.places
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return self.head(self.norm(hidden))


def text() -> torch.Tensor:
    """Return pieces of the standard library's modules, sorted by name, as bytes [n, LENGTH + 1]."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    content = bytearray(b"".join(file.read_bytes() for file in files))
    whole = len(content) - len(content) % (LENGTH + 1)
    return torch.frombuffer(content[:whole], dtype=torch.uint8).view(-1, LENGTH + 1)


def loss_of(model: nn.Module, pieces: torch.Tensor) -> torch.Tensor:
    """Return the mean loss per byte, in nats: each byte foretold from those before it."""
    pieces = pieces.long()
    return F.cross_entropy(model(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())


def train(options: argparse.Namespace, loader: rw.DataLoader, parts: dict[str, Any]) -> None:
    """Train up to --steps; say the mean loss of each round, and save what ``parts`` holds."""
    model, optimizer = parts["model"], parts["optimizer"]
    done = {"steps": 0}
    parts = {**parts, "loader": loader, "done": done}
    checkpoints = rw.Checkpointer(options.checkpoints, keep=2) if options.checkpoints else None
    if checkpoints:
        checkpoints.restore(**parts)
    losses: list[torch.Tensor] = []
    sizes: list[int] = []
    while done["steps"] < options.steps:
        for pieces in loader:
            loss = loss_of(model, pieces)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            sizes.append(len(pieces))
            done["steps"] += 1
            if done["steps"] % (options.every or 20) == 0:
                rw.print(f"step {done['steps']:4}  loss {rw.mean(losses, sizes):.3f}")
                losses.clear()
                sizes.clear()
            if checkpoints and done["steps"] % options.save_every == 0:
                checkpoints.save(**parts)
            if done["steps"] == options.steps:
                break


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=20, help="steps between exchanges; 0: no worker groups")
    parser.add_argument("--worker-groups", type=int, default=2)
    parser.add_argument("--compress", choices=["bf16", "fp16", "int8"], help="how worker groups send")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--global-batch-size", type=int, default=32, help="pieces per step of all ranks together")
    parser.add_argument("--checkpoints", type=Path, help="folder to save to and resume from")
    parser.add_argument("--save-every", type=int, default=100, help="steps between two checkpoints")
    options = parser.parse_args()

    with rw.join() as world:
        torch.manual_seed(0)
        if options.every:
            rw.mesh(worker_groups=options.worker_groups, dp_replicate=-1)
        model = rw.replicate(GPT().to(world.device))  # over the ranks of a worker group, where there are worker groups
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        parts: dict[str, Any] = {"model": model, "optimizer": optimizer}
        if options.every:
            parts["outer"] = rw.local_sgd(model, every=options.every, outer="diloco", compress=options.compress)
        kilobytes = sum(parameter.numel() for parameter in model.parameters()) * 4 / 1000
        rw.print(f"to exchange: {kilobytes:.0f} kB of float32, {kilobytes / (options.every or 1):.0f} kB per step")

        pieces = text()
        loader = rw.DataLoader(pieces[:-NUM_HELD_OUT], global_batch_size=options.global_batch_size, shuffle=True)
        train(options, loader, parts)
        if options.every:
            parts["outer"].synchronize()  # what came after the last whole round, too

        model.eval()
        with torch.no_grad():
            loss = loss_of(model, pieces[-NUM_HELD_OUT:].to(world.device)).item()
        rw.print(f"on text that was held out: loss {loss!r}", all_ranks=True)


if __name__ == "__main__":
    main()
