# SPDX-License-Identifier: Apache-2.0
"""``megengine.module``: the base class of models, on torch's. Layers are torch.nn's own, and asking for one says so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from rankwise.compat.megengine.not_offered import refused

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

__all__ = ["Module"]


class Module(nn.Module):
    """torch.nn.Module, with MegEngine's word for parameters and buffers together."""

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield the parameters, then the buffers: what ``dist.bcast_list_`` gives every rank."""
        yield from self.parameters()
        yield from self.buffers()


def __getattr__(name: str) -> Any:  # noqa: ANN401 - nothing is returned
    instead = {name: f"torch.nn.{name}: change this import to `import torch.nn as M`"} if hasattr(nn, name) else {}
    if not instead and not name.startswith("__"):
        instead = {name: "a module of torch.nn"}
    raise refused("megengine.module", name, instead, __all__)
