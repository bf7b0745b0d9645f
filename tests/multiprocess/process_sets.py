# SPDX-License-Identifier: Apache-2.0
"""What the tests of Horovod's process sets share: an operation of one set."""

from __future__ import annotations

import torch

import rankwise.compat.horovod as hvd


def total(value: float, name: str, process_set: hvd.ProcessSet = hvd.global_process_set) -> float:
    return hvd.allreduce(torch.tensor([float(value)]), op=hvd.Sum, name=name, process_set=process_set).item()
