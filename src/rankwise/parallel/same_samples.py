# SPDX-License-Identifier: Apache-2.0
"""Telling whether all ranks train on the same samples, as with a loader that divides them among nobody.

Used by gradient_sync, in the first step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rankwise.log import warn
from rankwise.parallel.same_inputs import digest_of
from rankwise.torch_private import tree as pytree

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rankwise.exchange.protocol import Exchange

MOST_ELEMENTS = 2**16
"""How much of each tensor is looked at."""


def digest_of_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Return a checksum of what a model was called with; 0 without tensors."""
    leaves = pytree.tree_leaves((tuple(args), dict(kwargs)))
    tensors = [leaf.detach() for leaf in leaves if type(leaf) is torch.Tensor and leaf.layout is torch.strided]
    try:
        return digest_of([tensor.flatten()[:MOST_ELEMENTS] for tensor in tensors])
    except RuntimeError:  # of tensors that have no values, as those inside torch.func have none
        return 0


def warn_of_same_samples(digest: int, exchange: Exchange, name: str) -> None:
    """Warn where every rank has called the model with the same.

    Called by: every rank of ``exchange``.

    Args:
        digest: of this rank's call; 0 where there is nothing to compare.
        exchange: the ranks.
        name: of the model.
    """
    found = exchange.all_gather(torch.tensor([digest]), what=f"what {name} was called with first").flatten().tolist()
    if len(found) > 1 and found[0] != 0 and len(set(found)) == 1:
        warn(
            f"every rank has called {name} with the same in the first step; if these are the samples, {len(found)} "
            "ranks do the work of one: iterate over rankwise.DataLoader, or give torch's a rankwise.ShardedSampler"
        )
