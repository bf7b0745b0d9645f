# SPDX-License-Identifier: Apache-2.0
"""What the README leaves to the reader: this, followed by a script of the README, runs."""

import torch
from torch.utils.data import TensorDataset


class Net(torch.nn.Sequential):
    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))


torch.manual_seed(0)
train_set = TensorDataset(torch.randn(300, 3), torch.randint(2, (300,)))
loss_fn = torch.nn.functional.cross_entropy
