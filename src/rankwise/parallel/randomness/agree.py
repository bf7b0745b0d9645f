# SPDX-License-Identifier: Apache-2.0
"""Generators that stand at the same place on all ranks, as draws for one batch need."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch

from rankwise.log import warn
from rankwise.parallel.randomness.source import default_generator
from rankwise.parallel.state_guard.facts import Repair, add_fact
from rankwise.session import current_or_none

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


class _Since:
    """What has happened since the world was joined."""

    has_drawn = False
    is_told = False


_since = _Since()


def compare_generators(exchange: Exchange, device: torch.device) -> None:
    """Have ranks compare torch's generator while they train, from a model's first draw on.

    Called by: every rank of ``exchange``.

    Args:
        exchange: the ranks that hold copies of the model.
        device: of the model.
    """

    def read() -> int | None:
        return _digest(torch.get_rng_state()) if _since.has_drawn and not is_short() else None

    def is_short() -> bool:
        """Return whether there are ranks without samples: dropout of nothing draws nothing."""
        session = current_or_none()
        return session is not None and session.batch is not None and session.batch.num_global < exchange.world_size

    def put_right(ranks: Exchange, *, is_expected: bool) -> None:
        take_rank_zeros(ranks, device)
        if not (is_expected or _since.is_told):
            _since.is_told = True
            warn(
                "torch's random number generator stood elsewhere on some ranks than on rank 0, whose state all have "
                "now: since they were last compared, models have drawn numbers on these ranks that do not belong to "
                "one batch; draw on all ranks or on none, along the batch inside `with rankwise.as_one_rank():`"
            )

    add_fact("The state of torch's random number generator", read, Repair(put_right, is_short))


def note_draw() -> None:
    """Note that a model has drawn."""
    _since.has_drawn = True


def forget_draws() -> None:
    """Note that none has. Called when the world is left."""
    _since.has_drawn = _since.is_told = False


def _digest(state: torch.Tensor) -> int:
    # Python's own hash is another one in each process.
    return int.from_bytes(hashlib.blake2b(state.numpy().tobytes(), digest_size=7).digest())


def take_rank_zeros(exchange: Exchange, device: torch.device) -> None:
    """Give every rank the state of rank zero's generators. Called by: every rank of ``exchange``."""
    for generator in _generators(device):
        what = f"state of torch's {generator.device.type} generator"
        generator.set_state(exchange.broadcast(generator.get_state(), 0, what=what))
