# SPDX-License-Identifier: Apache-2.0
"""What a script reads of tensors that are split over ranks, and draws for them, is that of the whole tensor.

torch itself reads a rank's part of a sum or a norm, on CPUs gives each part the same random numbers, and ignores what
is assigned to ``data`` and a part of gradients of gradients, all without an error. Used by shard and tensor_parallel.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from rankwise.errors import ConfigurationError
from rankwise.torch_private.dtensor import READING, check_data, own_part, replace_operations

if TYPE_CHECKING:
    from rankwise.comm.backends.protocol import Exchange
    from rankwise.comm.session import Session

_DRAWING = (
    *("normal_.default", "uniform_.default", "bernoulli_.float", "exponential_.default", "log_normal_.default"),
    *("random_.default", "random_.to", "random_.from", "cauchy_.default", "geometric_.default"),
    *("rand_like.default", "randn_like.default", "randint_like.default", "randint_like.low_dtype"),
)


def use_whole_tensors(session: Session, exchange: Exchange | None) -> None:
    """Have ``item()``, ``float()`` and ``bool()``, and random numbers, see whole tensors until the world is left.

    Assigning another tensor to ``data`` is an error.

    Args:
        session: of this rank.
        exchange: of the ranks that hold the parts, which must read together.
    """
    if exchange is None:
        return
    operations = {READING: partial(_read, exchange), **dict.fromkeys(_DRAWING, _draw)}
    session.at_end(replace_operations(operations))
    session.at_end(check_data(_refuse_others))


def _read(exchange: Exchange, _: object, tensor: Any) -> bool | float | complex:
    if any(placement.is_partial() for placement in tensor.placements):
        # Names a rank that does not read; torch would wait for it without a message.
        exchange.barrier("reading a number of split tensors (item(), float() or bool())")
    return tensor.full_tensor().item()


def _draw(operation: Any, tensor: Any, *args: object, **kwargs: object) -> Any:
    from torch.distributed.tensor import DTensor, Replicate  # noqa: PLC0415 - there already

    local, mesh = tensor.to_local(), tensor.device_mesh
    blank = torch.empty(tensor.shape, dtype=local.dtype, device=local.device)
    drawn = operation(blank, *args, **kwargs)
    whole = DTensor.from_local(drawn, mesh, [Replicate()] * mesh.ndim, run_check=False)
    part = whole.redistribute(placements=tensor.placements)  # sends nothing
    if drawn is not blank:
        return part
    local.copy_(part.to_local())
    return tensor


def _refuse_others(tensor: torch.Tensor, value: torch.Tensor) -> None:
    # After `p.data -= x` it is the same memory.
    if own_part(value).data_ptr() != own_part(tensor).data_ptr():
        raise ConfigurationError(
            f"Assigning to the data of a split parameter, {list(tensor.shape)}, would have no effect: torch keeps its "
            "part.",
            do="copy in place: `with torch.no_grad(): parameter.copy_(value)`",
        )


def refuse_second_derivatives(strategy: str) -> None:
    """Raise if the backward under way records a graph. Called by: nodes of that backward, which it then ends.

    Raises:
        ConfigurationError: ``create_graph=True`` was given.
    """
    # torch runs backward in the grad mode that create_graph asks for.
    if torch.is_grad_enabled():
        raise ConfigurationError(
            f"{strategy}() does not support gradients of gradients: create_graph=True was passed to "
            "torch.autograd.grad() or backward().",
            evidence="torch would leave a part of the second derivatives out",
            do="use rankwise.replicate(model), with which they are exact, or leave create_graph=True out",
        )
