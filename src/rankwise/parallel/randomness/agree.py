# SPDX-License-Identifier: Apache-2.0
"""Generators that stand at the same place on all ranks, as draws for one batch need."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rankwise.log import warn
from rankwise.parallel.randomness.source import default_generator

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
    for kind in dict.fromkeys(("cpu", device.type)):
        generator = default_generator(device if kind == device.type else torch.device("cpu"))
        state = generator.get_state()
        facts = torch.tensor([hash(state.numpy().tobytes()), int(generator.initial_seed() < LARGEST_SEED)])
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


def take_rank_zeros(exchange: Exchange, device: torch.device) -> None:
    """Give every rank the state of rank zero's generators. Called by: every rank of ``exchange``."""
    for kind in dict.fromkeys(("cpu", device.type)):
        generator = default_generator(device if kind == device.type else torch.device("cpu"))
        generator.set_state(exchange.broadcast(generator.get_state(), 0, what=f"state of torch's {kind} generator"))
