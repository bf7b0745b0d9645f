# SPDX-License-Identifier: Apache-2.0
"""Generators that stand at the same place on all ranks, as draws for one batch need."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch

from rankwise.log import warn
from rankwise.parallel.randomness.source import default_generator
from rankwise.parallel.state_guard.facts import add_fact

if TYPE_CHECKING:
    from rankwise.exchange.protocol import Exchange

LARGEST_SEED = 2**32
"""Seeds given by hand are smaller; those that torch takes from the system are larger, but for one in 4e9."""


def agree_on_generators(exchange: Exchange, device: torch.device) -> None:
    """Give every rank the state of rank zero's generators where they differ.

    Called by: every rank of ``exchange``.

    Args:
        exchange: the ranks.
        device: that models are on; its generator and the CPU's are compared.
    """
    for generator in _generators(device):
        kind, state = generator.device.type, generator.get_state()
        facts = torch.tensor([_digest(state), int(generator.initial_seed() < LARGEST_SEED)])
        on_ranks = exchange.all_gather(facts, what=f"state of torch's {kind} generator").view(-1, 2)
        if len(set(on_ranks[:, 0].tolist())) == 1:
            continue
        if bool(on_ranks[:, 1].any()):
            warn(
                f"torch's {kind} generator was seeded differently on the ranks, and now has the state of rank 0's on "
                "all of them, so that what a replicated model draws belongs to one batch; pass the same seed to "
                'torch.manual_seed() on every rank, or randomness="per_rank" to replicate() for independent numbers'
            )
        generator.set_state(exchange.broadcast(state, 0, what=f"state of torch's {kind} generator"))


def _generators(device: torch.device) -> list[torch.Generator]:
    found = [default_generator(one) for one in dict.fromkeys((torch.device("cpu"), device))]
    return [one for one in found if one is not None]


class GeneratorsInStep:
    """Has ranks compare torch's generator while they train, once a model has drawn from it."""

    def __init__(self, exchange: Exchange, device: torch.device) -> None:
        """Add a fact to what ranks compare.

        Called by: every rank of ``exchange``.

        Args:
            exchange: the ranks that hold copies of the model.
            device: of the model.
        """
        self.has_drawn = False
        """Whether a forward pass on this rank has drawn anything."""
        self._device = device
        self._is_told = False
        if exchange.world_size > 1:
            do = "draw what belongs to the samples inside `with rankwise.as_one_rank():`"
            add_fact("The state of torch's random number generator", self._read, do=do, put_right=self._put_right)

    def _read(self) -> int | None:
        return _digest(torch.get_rng_state()) if self.has_drawn else None

    def _put_right(self, exchange: Exchange) -> None:
        take_rank_zeros(exchange, self._device)
        if not self._is_told:
            self._is_told = True
            warn(
                "torch's random number generator stood elsewhere on some ranks than on rank 0, whose state all have "
                "now: since they were last compared, models have drawn numbers on these ranks that do not belong to "
                "one batch; draw on all ranks or on none, along the batch inside `with rankwise.as_one_rank():`"
            )


def _digest(state: torch.Tensor) -> int:
    # Python's own hash is another one in each process.
    return int.from_bytes(hashlib.blake2b(state.numpy().tobytes(), digest_size=7).digest())


def take_rank_zeros(exchange: Exchange, device: torch.device) -> None:
    """Give every rank the state of rank zero's generators. Called by: every rank of ``exchange``."""
    for generator in _generators(device):
        what = f"state of torch's {generator.device.type} generator"
        generator.set_state(exchange.broadcast(generator.get_state(), 0, what=what))
