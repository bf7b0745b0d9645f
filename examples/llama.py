# SPDX-License-Identifier: Apache-2.0
"""Train a small Llama of transformers on Python's own standard library, byte by byte, with any strategy.

    rankwise run -n 2 examples/llama.py --how shard
    rankwise run -n 2 examples/llama.py --how tensor_parallel
    rankwise run -n 2 examples/llama.py --how pipeline
    rankwise run -n 2 examples/llama.py --how replicate
    python examples/llama.py --how place

Then it trains the same on one device in plain PyTorch, and prints how far losses and parameters are apart: with
--small, which is tiny and in float64, by rounding in float64; else by what AdamW makes of rounding in float32.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the usual name
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import rankwise as rw

PROMISE = 1e-10
NUM_WORDS = 256

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Runs forward and backward on a batch, and returns its loss."""


class Bytes(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Pieces of text, and the same pieces one byte later."""

    def __init__(self, num_samples: int, length: int) -> None:
        files = sorted(Path(os.__file__).parent.glob("*.py"))
        text = b""
        while len(text) < num_samples * length + 1:
            text += files.pop(0).read_bytes()
        self.words = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.num_samples, self.length = num_samples, length

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        piece = self.words[index * self.length : (index + 1) * self.length + 1]
        return piece[:-1], piece[1:]


def build(arguments: argparse.Namespace) -> LlamaForCausalLM:
    torch.manual_seed(0)
    width, layers = (16, 2) if arguments.small else (256, 6)
    config = LlamaConfig(
        vocab_size=NUM_WORDS,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=arguments.length,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    if not arguments.small:
        return model
    # transformers' own norm calculates in float32 whatever the model's dtype, which would hide what is compared here.
    norms = [(name, norm) for name, norm in model.named_modules() if isinstance(norm, LlamaRMSNorm)]
    for name, norm in norms:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, nn.RMSNorm(width, eps=norm.variance_epsilon))
    return model.double()


def loss_fn(output: object, y: torch.Tensor) -> torch.Tensor:
    """Return the mean over all bytes."""
    return F.cross_entropy(output.logits.flatten(0, 1), y.flatten())


def plain_step(model: nn.Module) -> Step:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = loss_fn(model(x), y)
        loss.backward()
        return loss.detach()

    return step


def spread(model: LlamaForCausalLM, how: str, batch: torch.Tensor, folder: str) -> Step:
    """Spread the model as asked; return what runs a step of it."""
    if how == "shard":
        return plain_step(rw.shard(model, recompute=True))
    if how == "tensor_parallel":
        return plain_step(rw.tensor_parallel(model))
    if how == "replicate":
        return plain_step(rw.replicate(model))
    if how == "pipeline":
        return rw.pipeline(model, loss_fn, example=batch, micro_batches=2)
    if torch.cuda.is_available():
        return plain_step(rw.place(model, "auto", offload_folder=folder))
    # One device only: half of the layers wait on disk for their turn.
    last = len(model.model.layers) // 2
    plan = {"": "cpu"} | {f"model.layers.{number}": "disk" for number in range(last)}
    return plain_step(rw.place(model, plan, offload_folder=folder))


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters as one device has them, but for those that only other ranks have."""
    found = {}
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        if not value.is_meta:
            found[name] = value.cpu().clone()
    return found


def train(arguments: argparse.Namespace, device: str, folder: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    dataset = Bytes(arguments.samples, arguments.length)
    model = build(arguments)
    if arguments.how != "place":
        model = model.to(device)
    example = torch.stack([dataset[number][0] for number in range(arguments.batch)]).to(device)
    step = spread(model, arguments.how, example, folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # After the model was spread: ranks that share layers get the same samples.
    loader = rw.DataLoader(dataset, global_batch_size=arguments.batch, shuffle=False)
    losses = []
    for number, (x, y) in enumerate(loader, start=1):
        loss = step(x, y)
        rw.log_value("loss", loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(rw.mean(loss, len(x)))
        if number % 10 == 1:
            rw.print(f"step {number:4d}   loss {losses[-1]:.4f}")
    return losses, whole(model)


def train_on_one_device(arguments: argparse.Namespace, device: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same in plain PyTorch."""
    dataset = Bytes(arguments.samples, arguments.length)
    model = build(arguments).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for start in range(0, len(dataset), arguments.batch):
        rows = [dataset[number] for number in range(start, min(start + arguments.batch, len(dataset)))]
        x, y = (torch.stack(part).to(device) for part in zip(*rows, strict=True))
        losses.append(float(plain_step(model)(x, y)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, whole(model)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    hows = ("place", "shard", "tensor_parallel", "pipeline", "replicate")
    parser.add_argument("--how", choices=hows, default="shard")
    parser.add_argument("--small", action="store_true", help="tiny, in float64")
    parser.add_argument("--samples", type=int, help="pieces of text")
    parser.add_argument("--batch", type=int, help="pieces per step, on all ranks together")
    arguments = parser.parse_args()
    arguments.samples = arguments.samples or (22 if arguments.small else 1600)
    arguments.batch = arguments.batch or (6 if arguments.small else 16)
    arguments.length = 12 if arguments.small else 128

    with rw.join() as world, tempfile.TemporaryDirectory() as folder:
        losses, parameters = train(arguments, world.device, folder)
        ranks = f"{world.world_size} {'rank' if world.world_size == 1 else 'ranks'}"
        rw.print(f"{arguments.how} on {ranks}: loss {losses[0]:.4f} to {losses[-1]:.4f}")
        one_losses, one_parameters = train_on_one_device(arguments, world.device)
        apart = max(abs(a - b) / abs(b) for a, b in zip(losses, one_losses, strict=True))
        for name, value in parameters.items():
            one = one_parameters[name]
            apart = max(apart, float((value - one).abs().max() / one.abs().max()))
        apart = rw.all_reduce(apart, "max")
        promise = f"   (the promise: at most {PROMISE:.0e})" if arguments.small else ""
        rw.print(f"largest difference from one device: {apart:.1e}{promise}")
        return 1 if arguments.small and apart > PROMISE else 0


if __name__ == "__main__":
    sys.exit(main())
