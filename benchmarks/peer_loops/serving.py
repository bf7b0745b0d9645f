# SPDX-License-Identifier: Apache-2.0
"""A rank at the service of the coordinator: it waits in the kernel for a command, does it and answers.

Commands are methods of `Rank` with their arguments; an answer is ``(True, result)`` or ``(False, traceback)``.
"""

from __future__ import annotations

import itertools
import time
import traceback
from functools import partial
from multiprocessing.connection import Client
from typing import TYPE_CHECKING, Any

import torch
from models import ALL_MODELS
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np

    from peer_loops import Prepare, Step

NUM_BATCHES = 8
UNTIMED_STEPS = 2
SGD = partial(torch.optim.SGD, lr=1e-3)
ADAMW = partial(torch.optim.AdamW, lr=1e-4)


class Rank:
    """One rank's model, and what can be asked of it."""

    def __init__(self, number: int, prepare: Prepare) -> None:
        self._number = number
        self._prepare = prepare
        self._model: nn.Module
        self._step: Step
        self._batches: Iterator[torch.Tensor]

    def build(self, name: str, *, lively: bool) -> None:
        """Make a model ready for training with AdamW: the same on every rank, with batches that differ.

        With ``lively``, weights are such that a deep model's gradients depend on its batch. With torch's own they
        fade, so that ranks that exchange nothing would agree too. The optimizer is SGD then: AdamW turns the rounding
        of a gradient near zero into a whole step.
        """
        torch.set_num_threads(1)  # some libraries set it while they start
        torch.manual_seed(0)
        self._model, shape = ALL_MODELS[name]()
        if lively:
            for parameter in self._model.parameters():
                if parameter.dim() > 1:
                    nn.init.kaiming_normal_(parameter)
        self._step = self._prepare(self._model, SGD if lively else ADAMW)
        torch.manual_seed(1 + self._number)
        self._batches = itertools.cycle([torch.randn(*shape) for _ in range(NUM_BATCHES)])

    def run(self, num_steps: int) -> float:
        """Train and return the seconds per step. The first steps, which meet the others' caches, do not count."""
        for x in itertools.islice(self._batches, UNTIMED_STEPS):
            self._step(x)
        started = time.perf_counter()
        for x in itertools.islice(self._batches, num_steps):
            self._step(x)
        return (time.perf_counter() - started) / num_steps

    def parameters(self) -> np.ndarray[Any, Any]:
        """Return all parameters in one row."""
        return nn.utils.parameters_to_vector(self._model.parameters()).detach().numpy()


def serve(address: str, number: int, prepare: Prepare) -> None:
    """Answer the coordinator at ``address`` until it says that it is done, with ``None``."""
    rank = Rank(number, prepare)
    with Client(address) as connection:
        connection.send(number)
        while (command := connection.recv()) is not None:
            method, arguments, options = command
            try:
                answer = (True, getattr(rank, method)(*arguments, **options))
            except Exception:  # noqa: BLE001 - the coordinator says it, whatever it is
                answer = (False, traceback.format_exc())
            connection.send(answer)
