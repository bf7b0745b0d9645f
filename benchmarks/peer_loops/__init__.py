# SPDX-License-Identifier: Apache-2.0
"""One training loop, in each library's own words: a file per library.

Each file has one function, ``train``, run in every rank. It sets its library up, then calls ``serve`` with this
rank's number and a function that makes a model ready for training, with an optimizer for its parameters, and returns
its training step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

Step = Callable[[torch.Tensor], None]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Prepare = Callable[[nn.Module, MakeOptimizer], Step]
Serve = Callable[[int, Prepare], None]
