# SPDX-License-Identifier: Apache-2.0
"""Samples are drawn in two workers that live on between epochs; each seeds Python and NumPy as torch seeds it."""
import random

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info


def seed_all(worker):
    seed = get_worker_info().seed
    random.seed(seed)
    np.random.seed((seed + worker) % 1_000_003)


class Throws(Dataset):
    """Where four darts hit, thrown at one of three places."""

    def __init__(self, throws):
        self.aims = [throw % 3 for throw in range(throws)]

    def __len__(self):
        return len(self.aims)

    def __getitem__(self, throw):
        aim = self.aims[throw]
        by_hand = np.random.standard_normal(4) + random.triangular(-0.1, 0.1)
        return torch.normal(torch.from_numpy(aim + by_hand), 0.1), aim


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    order = torch.Generator().manual_seed(1)
    throws = DataLoader(
        Throws(34), 6, shuffle=True, generator=order, num_workers=2, persistent_workers=True, worker_init_fn=seed_all
    )
    judge = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(judge.parameters(), lr=0.1)
    for epoch in range(2):
        losses = []
        for darts, aims in throws:
            loss = torch.nn.functional.cross_entropy(judge(darts), aims)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        print("epoch", epoch, "losses", *[f"{loss:.12g}" for loss in losses])
