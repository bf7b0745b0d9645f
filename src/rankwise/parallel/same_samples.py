# SPDX-License-Identifier: Apache-2.0
"""What ranks call a model with first: the same samples, as from a loader that divides them among nobody, or other ones.

Used by gradient_sync, in the first step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from rankwise.log import log, warn
from rankwise.parallel.same_inputs import digest_of
from rankwise.parallel.trained import samples_of
from rankwise.session import current_or_none
from rankwise.torch_private import tree as pytree

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rankwise.exchange.protocol import Exchange

MOST_ELEMENTS = 2**16
"""How much of each tensor is looked at."""


class FirstCall(NamedTuple):
    """What a model was first called with."""

    digest: int
    """A checksum of its tensors; 0 without any."""
    num_samples: int
    """The first dimension of its first tensor; 0 without any."""
    has_loader: bool
    """Whether the script has made a loader or sampler of ours."""


def first_call_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> FirstCall:
    """Return what a model was called with."""
    leaves = pytree.tree_leaves((tuple(args), dict(kwargs)))
    tensors = [leaf.detach() for leaf in leaves if type(leaf) is torch.Tensor and leaf.layout is torch.strided]
    num_samples = int(samples_of(None, args, dict(kwargs)) or 0)
    try:
        digest = digest_of([tensor.flatten()[:MOST_ELEMENTS] for tensor in tensors])
    except RuntimeError:  # of tensors that have no values, as those inside torch.func have none
        digest = 0
    session = current_or_none()
    return FirstCall(digest, num_samples, session is not None and session.num_loaders > 0)


def tell_of_first_calls(call: FirstCall | None, exchange: Exchange, name: str, *, is_sum: bool) -> None:
    """Warn where every rank has called the model with the same; say how other batches are read that no loader gave.

    Called by: every rank of ``exchange``.

    Args:
        call: of this rank; ``None`` where there is nothing to compare.
        exchange: the ranks.
        name: of the model.
        is_sum: whether its loss is a sum over samples, so that the gradients of all ranks are added up.
    """
    own = torch.tensor([list(map(int, call or FirstCall(0, 0, has_loader=True)))])
    calls = exchange.all_gather(own, what=f"what {name} was called with first").view(-1, 3).tolist()
    digests = {digest for digest, _, _ in calls}
    if len(calls) == 1 or 0 in digests:
        return
    if len(digests) == 1:
        summed = f", and the gradients of its loss, a sum, are {len(calls)} times those of one" if is_sum else ""
        warn(
            f"every rank has called {name} with the same in the first step; if these are the samples, {len(calls)} "
            f"ranks do the work of one{summed}: iterate over rankwise.DataLoader, or give torch's a "
            "rankwise.ShardedSampler"
        )
    elif not any(has_loader for _, _, has_loader in calls):
        total = sum(num_samples for _, num_samples, _ in calls)
        log(
            f"first step: {name} was called with {total} samples on {len(calls)} ranks together, from no loader of "
            "rankwise's: what each rank passes is taken for its part of one global batch"
        )
