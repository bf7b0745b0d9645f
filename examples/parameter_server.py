# SPDX-License-Identifier: Apache-2.0
"""Train on scikit-learn's handwritten digits with a parameter server: the last rank keeps the model, the others train.

    rankwise run -n 4 examples/parameter_server.py --mode async
    rankwise run -n 4 examples/parameter_server.py --mode async --max-staleness 4 --slow-worker 4
    rankwise run -n 4 examples/parameter_server.py --mode sync --slow-worker 4

Each worker prints its time at the end. With --mode sync all wait for the slow one in every step. With
--mode async none does until it is ahead by --max-staleness steps, and workers may be killed (-9) while it runs.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from digits import Net, digits
from torch.nn import functional as F  # noqa: N812 - the usual name

import rankwise as rw


def accuracy(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the share of digits that this rank's model gets right."""
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).double().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=["sync", "async"], default="async")
    parser.add_argument("--max-staleness", type=int, help="how many steps a worker may be ahead of the slowest")
    parser.add_argument("--slow-worker", type=float, default=1.0, help="how many times longer rank 0 takes for a step")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, help="of one update")
    parser.add_argument("--directory", type=Path, help="where the server saves what it has, and resumes from")
    options = parser.parse_args()
    # In sync a step is one update, by 96 digits; in async it is three, each by the 32 digits of a worker.
    lr = options.lr or (3e-3 if options.mode == "sync" else 1e-3)

    with rw.join() as world:
        torch.manual_seed(0)
        train_set, test_set = digits(torch.float32)
        model = Net().to(world.device)
        optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        server = rw.parameter_server(
            model,
            optimizer,
            servers=1,
            mode=options.mode,
            max_staleness=options.max_staleness,
            directory=options.directory,
        )
        loader = rw.DataLoader(train_set, global_batch_size=96, shuffle=True)
        server.restore(loader)

        num_steps = 0
        started = time.perf_counter()
        for _ in range(loader.epoch, options.epochs):
            for x, y in loader:  # on the server: no batches; it serves until all workers are through the epoch
                step_started = time.perf_counter()
                F.cross_entropy(model(x), y).backward()
                if world.rank == 0:
                    time.sleep((options.slow_worker - 1) * (time.perf_counter() - step_started))
                optimizer.step()  # sends the gradients to the server; its parameters come back
                optimizer.zero_grad()
                num_steps += 1
        seconds = time.perf_counter() - started
        if not server.is_server:
            rw.print(f"{num_steps} steps in {seconds:.2f} s", all_ranks=True)

        # The server has the newest parameters, whichever workers remain. If no rank may be lost, server.synchronize()
        # gives them to all.
        if server.is_server:
            reached = accuracy(model, *(tensor.to(world.device) for tensor in test_set.tensors))
            rw.print(f"accuracy {reached:.4f} with {options.mode} updates", all_ranks=True)


if __name__ == "__main__":
    main()
