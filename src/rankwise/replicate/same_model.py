# SPDX-License-Identifier: Apache-2.0
"""Whether every rank built the same model, and making its values the same. Used by every strategy."""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING

import torch

from rankwise.comm.collectives import gather_json
from rankwise.comm.session import current
from rankwise.errors import ModelMismatch, fold_values
from rankwise.torch_private import foreach
from rankwise.torch_private.dtensor import own_part

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import nn

    from rankwise.comm.backends.protocol import Exchange

CHUNK_BYTES = 64 * 2**20


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
        foreach.copy_(chunk, [piece.view(tensor.shape) for tensor, piece in zip(chunk, pieces, strict=True)])


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
            if size_bytes >= CHUNK_BYTES:
                yield chunk
                chunk, size_bytes = [], 0
        if chunk:
            yield chunk
