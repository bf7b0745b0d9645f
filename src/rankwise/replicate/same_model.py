# SPDX-License-Identifier: Apache-2.0
"""Whether every rank built the same model and calls it with the same inputs, and making its values the same.

Some strategies need the same inputs, others give each rank its own samples. Used by every strategy.
"""

from __future__ import annotations

import zlib
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from rankwise.comm.collectives import gather_json
from rankwise.comm.same_state import numbers_of_all
from rankwise.comm.session import current, current_or_none
from rankwise.errors import ModelMismatch, fold_values
from rankwise.log import log, warn
from rankwise.replicate.loss.graph import first_tensor
from rankwise.tensors.arrays import memory_of
from rankwise.torch_private.dtensor import own_part
from rankwise.torch_private.tensors import foreach_copy_, tree_leaves

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch import nn

    from rankwise.comm.backends.protocol import Exchange


BROADCAST_CHUNK_BYTES = 64 * 2**20


def check_same_model(model: nn.Module) -> None:
    """Raise the same error on every rank unless all built the same parameters and buffers.

    Called by: every rank.

    Raises:
        ModelMismatch: names the first difference and what each rank has there.
    """
    own = [f"parameter {name} {described(p)} requires_grad={p.requires_grad}" for name, p in model.named_parameters()]
    own += [f"buffer {name} {described(b)}" for name, b in model.named_buffers()]
    of_rank = gather_json(own, what="comparing the parameters of a model")
    if all(other == of_rank[0] for other in of_rank):
        return
    for index, lines in enumerate(zip_longest(*of_rank, fillvalue="nothing")):
        if len(set(lines)) > 1:
            raise ModelMismatch(
                "The model is not the same on every rank.",
                where=f"reported on {current().world}",
                evidence=f"the first difference is entry {index}:\n{fold_values(dict(enumerate(lines)))}",
                do="create the model with the same arguments on every rank",
            )


def described(tensor: torch.Tensor) -> str:
    """Return dtype and shape of a tensor, as ``float32[8, 3]``."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def broadcast_model(model: nn.Module, exchange: Exchange) -> None:
    """Overwrite parameters and buffers with rank zero's. Called by: every rank."""
    tensors = [*model.parameters(), *model.buffers()]
    with torch.no_grad():
        broadcast_tensors([own_part(t).detach() for t in tensors], exchange, what="parameters of rank 0")


def broadcast_tensors(tensors: Iterable[torch.Tensor], exchange: Exchange, *, what: str, source: int = 0) -> None:
    """Overwrite ``tensors`` with those of rank ``source``, many at a time.

    Called by: every rank, with tensors of the same shapes and dtypes.
    """
    for chunk in _chunks(tensors):
        flat = torch.cat([tensor.reshape(-1) for tensor in chunk])
        # As bytes: a broadcast calculates nothing, and Gloo does not know every dtype.
        sent = exchange.broadcast(flat.view(torch.uint8), source, what=what)
        pieces = sent.view(flat.dtype).split([tensor.numel() for tensor in chunk])
        foreach_copy_(chunk, [piece.view(tensor.shape) for tensor, piece in zip(chunk, pieces, strict=True)])


def _chunks(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield lists of tensors of one device and dtype, up to a size, in an order all ranks share."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    for same in by_kind.values():
        chunk: list[torch.Tensor] = []
        size_bytes = 0
        for tensor in same:
            chunk.append(tensor)
            size_bytes += tensor.nbytes
            if size_bytes >= BROADCAST_CHUNK_BYTES:
                yield chunk
                chunk, size_bytes = [], 0
        if chunk:
            yield chunk


CHECKED_STEPS = 3
"""How many of the first steps compare values too; shapes are compared in all."""
MOST_ELEMENTS = 2**16
"""How much of each tensor is compared."""


def digest_of_tensors(values: object) -> int:
    """Return a checksum of the tensors of a tree."""
    # With no operation of torch on samples: a mode that follows them may be on.
    digest = 0
    for leaf in tree_leaves(values):
        if isinstance(leaf, torch.Tensor) and not leaf.is_meta:
            plain = leaf.detach().to("cpu").contiguous()
            digest = zlib.crc32(memory_of(plain), zlib.crc32(str(plain.shape).encode(), digest))
    return digest


def describe_arguments(args: Sequence[object], kwargs: Mapping[str, object]) -> str:
    """Return the arguments of a call by dtypes and shapes, as ``float32[8, 3], mask=bool[8]``."""
    return ", ".join([*map(_describe, args), *(f"{name}={_describe(value)}" for name, value in kwargs.items())])


def _describe(value: object) -> str:
    leaves = tree_leaves(value)
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
    leaves = tree_leaves((tuple(args), dict(kwargs)))
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

    def wait_for_all(self, model: nn.Module, inputs: object = None) -> None:
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
        call = [f"forward {self._count} of a {self._name}"]
        call.append(f"{'with' if torch.is_grad_enabled() else 'without'} gradients")
        if inputs is not None:
            call.append("in training" if model.training else "in evaluation")
            call += [described(one) for one in tree_leaves(inputs) if isinstance(one, torch.Tensor)]
        self._exchange.barrier(", ".join(call))
