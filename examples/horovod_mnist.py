# SPDX-License-Identifier: Apache-2.0
"""A typical script for Horovod, on the digits of examples/digits.py. Horovod need not be installed.

    rankwise run -n 2 -m rankwise.compat.horovod examples/horovod_mnist.py
    rankwise horovodrun -np 2 python examples/horovod_mnist.py
    mpirun -n 2 python -m rankwise.compat.horovod examples/horovod_mnist.py
docs/from-horovod.md shows how to write it for rankwise.
"""

from __future__ import annotations

import argparse

import horovod.torch as hvd
import torch
from digits import Net, digits
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def average(value: float, name: str) -> float:
    return hvd.allreduce(torch.tensor(value, dtype=torch.float64), name=name).item()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="of each rank and backward pass")
    parser.add_argument("--batches-per-allreduce", type=int, default=1)
    parser.add_argument("--lr", type=float, default=0.02, help="of one rank")
    parser.add_argument("--fp16-allreduce", action="store_true")
    parser.add_argument("--use-adasum", action="store_true")
    parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
    options = parser.parse_args()

    hvd.init()
    torch.manual_seed(42)
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        torch.cuda.set_device(hvd.local_rank())
        device = torch.device("cuda")

    train_set, test_set = digits(torch.float32)
    sampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(train_set, batch_size=options.batch_size, sampler=sampler)
    test_sampler = DistributedSampler(test_set, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False)
    test_loader = DataLoader(test_set, batch_size=120, sampler=test_sampler)

    model = Net().to(device)
    # Adasum needs no larger steps for more ranks.
    num_batches = options.batches_per_allreduce * (1 if options.use_adasum else hvd.size())
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr * num_batches, momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if options.fp16_allreduce else hvd.Compression.none,
        backward_passes_per_step=options.batches_per_allreduce,
        op=hvd.Adasum if options.use_adasum else hvd.Average,
        gradient_predivide_factor=options.gradient_predivide_factor,
    )

    for epoch in range(options.epochs):
        model.train()
        sampler.set_epoch(epoch)
        losses = []
        for number, (x, y) in enumerate(loader, 1):
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            (loss / options.batches_per_allreduce).backward()
            losses.append(loss.item())
            if number % options.batches_per_allreduce == 0 or number == len(loader):
                optimizer.step()
                optimizer.zero_grad()
        loss = average(sum(losses) / len(losses), "loss")

        model.eval()
        right = seen = 0
        with torch.no_grad():
            for x, y in test_loader:
                right += int((model(x.to(device)).argmax(1).cpu() == y).sum())
                seen += len(y)
        accuracy = average(right / seen, "accuracy")
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1:2}  loss {loss:.4f}  accuracy {accuracy:.4f}", flush=True)


if __name__ == "__main__":
    main()
