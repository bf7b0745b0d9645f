# SPDX-License-Identifier: Apache-2.0
"""One training loop, in each library's own words: a file per library.

Each file has one function, ``train``, run in every rank. It sets its library up, then calls ``serve`` with this
rank's number and a function that makes a model ready for training and returns its training step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

LEARNING_RATE = 1e-3

Step = Callable[[torch.Tensor], None]
Prepare = Callable[[nn.Module], Step]
Serve = Callable[[int, Prepare], None]
