# SPDX-License-Identifier: Apache-2.0
"""Whether ranks call a model with the same inputs: some strategies need that, others give each rank its own samples.

Used by gradient_sync, shard, pipeline and tensor_parallel.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from rankwise.comm.same_state.collective import numbers_of_all
from rankwise.comm.session import current_or_none
from rankwise.log import log, warn
from rankwise.replicate.loss.graph import first_tensor
from rankwise.replicate.same_model import described
from rankwise.tensors.arrays import memory_of
from rankwise.torch_private import tree as pytree

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from rankwise.comm.backends.protocol import Exchange


CHECKED_STEPS = 3
"""How many of the first steps compare values too; shapes are compared in all."""
MOST_ELEMENTS = 2**16
"""How much of each tensor is compared."""


def digest_of_tensors(values: object) -> int:
    """Return a checksum of the tensors of a tree."""
    # With no operation of torch on samples: a mode that follows them may be on.
    digest = 0
    for leaf in pytree.tree_leaves(values):
        if isinstance(leaf, torch.Tensor) and not leaf.is_meta:
            plain = leaf.detach().to("cpu").contiguous()
            digest = zlib.crc32(memory_of(plain), zlib.crc32(str(plain.shape).encode(), digest))
    return digest


def describe_arguments(args: Sequence[object], kwargs: Mapping[str, object]) -> str:
    """Return the arguments of a call by dtypes and shapes, as ``float32[8, 3], mask=bool[8]``."""
    return ", ".join([*map(_describe, args), *(f"{name}={_describe(value)}" for name, value in kwargs.items())])


def _describe(value: object) -> str:
    leaves = pytree.tree_leaves(value)
    words = [described(leaf) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves]
    return words[0] if len(words) == 1 else "(" + ", ".join(words) + ")"


class FirstCall(NamedTuple):
    """The inputs that a model was first called with."""

    digest: int
    """A checksum of the tensors; 0 without any."""
    num_samples: int
    """The first dimension of the first tensor; 0 without any."""
    has_loader: bool
    """Whether the script has created a loader or sampler of rankwise."""


def first_call_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> FirstCall:
    """Return the facts of a model's first call."""
    leaves = pytree.tree_leaves((tuple(args), dict(kwargs)))
    tensors = [leaf.detach() for leaf in leaves if type(leaf) is torch.Tensor and leaf.layout is torch.strided]
    first = first_tensor((args, dict(kwargs)))
    num_samples = 0 if first is None else int(first.shape[0])
    try:
        digest = digest_of_tensors([tensor.flatten()[:MOST_ELEMENTS] for tensor in tensors])
    except RuntimeError:  # some tensors have no values, as inside torch.func
        digest = 0
    session = current_or_none()
    return FirstCall(digest, num_samples, session is not None and session.num_loaders > 0)


def report_first_calls(call: FirstCall | None, exchange: Exchange, name: str, *, is_sum: bool) -> None:
    """Warn if every rank called the model with the same inputs; log how other inputs that no loader gave are read.

    Called by: every rank of ``exchange``.

    Args:
        call: of this rank; ``None`` if there is nothing to compare.
        exchange: the ranks.
        name: of the model.
        is_sum: whether its loss is a sum over samples, so that the gradients of all ranks are added up.
    """
    own = list(map(int, call or FirstCall(0, 0, has_loader=True)))
    calls = numbers_of_all(exchange, own, f"the first inputs of {name}")
    digests = {digest for digest, _, _ in calls}
    if len(calls) == 1 or 0 in digests:
        return
    if len(digests) == 1:
        summed = f", and the gradients of its summed loss are {len(calls)} times those of one rank" if is_sum else ""
        warn(
            f"every rank called {name} with the same inputs in the first step; if these are the samples, "
            f"{len(calls)} ranks do the work of one{summed}: iterate over rankwise.DataLoader, or pass a "
            "rankwise.ShardedSampler to torch's DataLoader"
        )
    elif not any(has_loader for _, _, has_loader in calls):
        total = sum(num_samples for _, num_samples, _ in calls)
        log(
            f"first step: {name} was called with {total} samples on {len(calls)} ranks together, not from a "
            "loader of rankwise: the inputs of each rank are treated as its part of one global batch"
        )


class SameForward:
    """Counts the calls of one model, and compares them between ranks before anything of the model is sent."""

    def __init__(self, exchange: Exchange | None, name: str) -> None:
        """Start counting for the ranks that share the model, whose name in errors is such as ``"sharded Net"``."""
        self._exchange = exchange
        self._name = name
        self._count = 0

    def meet(self, model: nn.Module, inputs: object = None) -> None:
        """Wait for every rank to reach this forward.

        Called by: every rank that shares the model.

        Args:
            model: that is called.
            inputs: of the call, if they must have the same shapes on every rank.

        Raises:
            CollectiveMismatch: another rank is in another forward, or elsewhere.
        """
        if self._exchange is None:
            return
        self._count += 1
        said = [f"forward {self._count} of a {self._name}"]
        said.append(f"{'with' if torch.is_grad_enabled() else 'without'} gradients")
        if inputs is not None:
            said.append("in training" if model.training else "in evaluation")
            said += [described(one) for one in pytree.tree_leaves(inputs) if isinstance(one, torch.Tensor)]
        self._exchange.barrier(", ".join(said))
