# SPDX-License-Identifier: Apache-2.0
"""Memory that a server and the workers of its host both see, where they can; elsewhere all goes through sockets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.exchange.choose import home_of
from rankwise.exchange.mapping import Mapping
from rankwise.exchange.torch_group import TorchGroup
from rankwise.parallel.server.layout import shared_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from rankwise.exchange.protocol import Exchange
    from rankwise.world import World


def shared_home(exchange: Exchange, world: World) -> str:
    """Return what ranks that can share memory have in common; nothing where this one is not to.

    Args:
        exchange: of all ranks. Gloo between CPU ranks was asked for, or there is a reason.
        world: this rank's.
    """
    if isinstance(exchange, TorchGroup) and world.device == "cpu":
        return ""
    home = home_of(world)
    return "" if home.startswith("!") else home


def create_memory(tensors: Sequence[torch.Tensor]) -> Mapping | None:
    """Return memory for one value of each of ``tensors``, if the machine gives it."""
    try:
        return Mapping.create(shared_bytes(tensors))
    except OSError:
        return None


def open_memory(ticket: str, tensors: Sequence[torch.Tensor]) -> Mapping | None:
    """Return what another process has created for the same tensors, if it can be seen from here.

    Args:
        ticket: of the other's :class:`rankwise.exchange.mapping.Mapping`; empty for none.
        tensors: their shapes and dtypes count.
    """
    try:
        return Mapping.open(ticket, shared_bytes(tensors)) if ticket else None
    except OSError:
        return None
