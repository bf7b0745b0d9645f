# SPDX-License-Identifier: Apache-2.0
"""``megengine.module``: the base class of models, on torch's. Layers are torch.nn's; using one here is an error."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from rankwise.compat.megengine.alias import refusing

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

__all__ = ["Module"]


class Module(nn.Module):
    """torch.nn.Module, with MegEngine's method for parameters and buffers together."""

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield the parameters, then the buffers, for ``dist.bcast_list_``."""
        yield from self.parameters()
        yield from self.buffers()


def _instead(name: str) -> str | None:
    if hasattr(nn, name):
        return f"torch.nn.{name}: change this import to `import torch.nn as M`"
    return None if name.startswith("__") else "a module of torch.nn"


__getattr__ = refusing("megengine.module", __all__, _instead)
