# SPDX-License-Identifier: Apache-2.0
"""Two persistent workers, each with seeds of its own, as the notes on randomness say."""
import random

import numpy
import torch
from torch.utils.data import DataLoader, Dataset


def seed_worker(worker_id):
    worker_seed = torch.initial_seed() % 2**32
    numpy.random.seed(worker_seed)
    random.seed(worker_seed)


class Noisy(Dataset):
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        x = numpy.random.normal(loc=i % 3, size=4) + random.gauss(0, 0.1)
        return torch.as_tensor(x) + 0.1 * torch.randn(4, dtype=torch.double), i % 3


def main():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    g = torch.Generator()
    g.manual_seed(0)
    loader = DataLoader(
        Noisy(34), batch_size=6, num_workers=2, worker_init_fn=seed_worker, generator=g, shuffle=True, persistent_workers=True
    )
    model = torch.nn.Linear(4, 3)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        total = 0.0
        for x, y in loader:
            loss = torch.nn.functional.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.item() * x.size(0)
        print(f"epoch {epoch}: {total / len(loader.dataset):.12g}")


if __name__ == "__main__":
    main()
