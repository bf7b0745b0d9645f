# SPDX-License-Identifier: Apache-2.0
"""What one optimizer of a hand-written script steps: models of DistributedDataParallel, and unwrapped tensors.

Reads tensors, sends nothing. Used by ``ranks``.
"""

from __future__ import annotations

import gc
import zlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from rankwise.tensors.checksum import ChecksumOfAll, settings_of
from rankwise.tensors.rounding import summary_of, tolerance

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.optim.optimizer import Optimizer

REPLICATES = "DistributedDataParallel"
SPREADS = "FullyShardedDataParallel"
"""Classes of torch, by name: importing them would load what the script does not use."""


class Stepped:
    """Tensors that an optimizer steps, and that should be equal on a set of ranks."""

    def __init__(
        self, names: Sequence[str], tensors: Sequence[torch.Tensor], ranks: Sequence[int], *, is_wrapped: bool
    ) -> None:
        self.names = list(names)
        self.tensors = list(tensors)
        self.ranks = list(ranks)
        """The ranks that hold them too, in torch's default group."""
        self.is_wrapped = is_wrapped
        """Whether DistributedDataParallel keeps them equal; otherwise it is unknown."""
        self._checksum = ChecksumOfAll()

    def checksum(self) -> int:
        """Return a checksum of the values."""
        return self._checksum(self.tensors)

    def checksum_of_shapes(self) -> int:
        """Return the checksum by which ranks match: ranks that step other shapes train other models on purpose."""
        return zlib.crc32(str([(tuple(one.shape), str(one.dtype)) for one in self.tensors]).encode())

    def tolerances(self) -> list[float]:
        """Return the relative difference in norm that rounding may cause for each tensor."""
        return [tolerance(one.dtype) for one in self.tensors]

    def details(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return summaries of values and gradients, and the hyperparameters, in a form for JSON."""
        gradients = [one.grad for one in self.tensors]
        return {
            "values": [summary_of(one) for one in self.tensors],
            "gradients": [None if one is None or one.is_sparse else summary_of(one) for one in gradients],
            "groups": [settings_of(group) for group in optimizer.param_groups],
        }


def stepped_by(optimizer: Optimizer) -> list[Stepped]:
    """Return the tensors of an optimizer to compare: one entry per DistributedDataParallel, one for the rest."""
    held = {id(p): p for group in optimizer.param_groups for p in group["params"] if _is_plain(p)}
    found: list[Stepped] = []
    modules = [one for one in gc.get_objects() if issubclass(type(one), nn.Module)]
    for module in modules:
        kinds = {base.__name__ for base in type(module).__mro__}
        if SPREADS in kinds:
            for parameter in module.parameters():
                held.pop(id(parameter), None)
        elif REPLICATES in kinds:
            own = {name: p for name, p in module.module.named_parameters() if held.pop(id(p), None) is not None}
            if own:
                ranks = dist.get_process_group_ranks(module.process_group)
                found.append(Stepped(list(own), list(own.values()), ranks, is_wrapped=True))
    if held:
        names = [_name_of(number, one, modules) for number, one in enumerate(held.values())]
        found.append(Stepped(names, list(held.values()), range(dist.get_world_size()), is_wrapped=False))
    return found


def _is_plain(parameter: torch.Tensor) -> bool:
    """Return whether a tensor has plain values on this rank. Only a DTensor has a mesh."""
    has_mesh = getattr(parameter, "device_mesh", None) is not None
    return not (has_mesh or parameter.is_meta) and parameter.layout is torch.strided


def _name_of(number: int, tensor: torch.Tensor, modules: Sequence[nn.Module]) -> str:
    for module in modules:
        for name, own in module.named_parameters(recurse=False):
            if own is tensor:
                return f"{name} of {type(module).__name__}"
    return f"tensor {number}"
