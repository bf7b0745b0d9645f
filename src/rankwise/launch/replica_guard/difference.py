# SPDX-License-Identifier: Apache-2.0
"""The tensors that an optimizer of a hand-written script steps, and how those of several ranks differ.

Models of DistributedDataParallel, and unwrapped tensors. Sends nothing. Used by ``ranks``.
"""

from __future__ import annotations

import gc
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from rankwise.errors import ReplicasDiffer, fold_values
from rankwise.tensors.checksum import ChecksumOfAll, is_same_setting, settings_of
from rankwise.tensors.rounding import is_rounding, summary_of, tolerance

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.optim.optimizer import Optimizer

Report = dict[str, Any]
"""The report of one rank: summaries of values and gradients, and the parameter groups' hyperparameters."""

MOST_NAMES = 5
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


@dataclass(frozen=True, slots=True)
class Difference:
    """A description of a difference between ranks."""

    what: str
    evidence: str
    do: str
    has_own_gradients: bool
    """Whether ranks have stepped with different gradients: then nothing keeps them equal, perhaps on purpose."""

    def error(self) -> ReplicasDiffer:
        """Return the error if DistributedDataParallel should have kept the ranks equal."""
        return ReplicasDiffer(self.what, evidence=self.evidence, do=self.do)

    def warning(self) -> str:
        """Return the warning, given once, if the ranks may differ on purpose."""
        return (
            f"{self.what} {'; '.join(self.evidence.splitlines())}; nothing keeps them equal: {self.do}; "
            "if ranks are meant to differ, remove --guard"
        )


def difference_between(
    reports: Mapping[int, Report], part: Stepped, optimizer: str, num_steps: int
) -> Difference | None:
    """Return the first difference between ranks' reports that is more than rounding; ``None`` if there is none."""
    where = f"after step {num_steps} of {optimizer}"
    has_own_gradients = bool(_apart(reports, part, "gradients"))
    setting = _first_setting(list(reports.values()))
    if setting is not None:
        number, key = setting
        held = {rank: report["groups"][number].get(key) for rank, report in reports.items()}
        return Difference(
            f"{key} of {optimizer} is not the same on all ranks {where}.",
            fold_values(held),
            "set it from values that are the same on all ranks: give a scheduler the mean of all losses, by all_reduce",
            has_own_gradients,
        )
    apart = _apart(reports, part, "values")
    if not apart:
        return None
    first = apart[0]
    names = ", ".join(part.names[number] for number in apart[:MOST_NAMES]) + (", ..." if apart[MOST_NAMES:] else "")
    norms = {rank: f"norm {report['values'][first][1]:.9g}" for rank, report in reports.items()}
    return Difference(
        f"{'Parameter ' if part.is_wrapped else ''}{part.names[first]} is not the same on all ranks {where}.",
        f"{fold_values(norms)}\n{len(apart)} of {len(part.names)} tensors differ: {names}",
        "load weights and the optimizer's state on every rank, and average rank-local changes with all_reduce"
        if part.is_wrapped
        else "wrap its module in DistributedDataParallel, or average its gradients with all_reduce",
        has_own_gradients,
    )


def _first_setting(reports: Sequence[Report]) -> tuple[int, str] | None:
    """Return the number of a parameter group and the key that differs in it."""
    for number, groups in enumerate(zip(*(report["groups"] for report in reports), strict=False)):
        for key, value in groups[0].items():
            if any(not is_same_setting(group.get(key), value) for group in groups):
                return number, key
    return None


def _apart(reports: Mapping[int, Report], part: Stepped, what: str) -> list[int]:
    """Return the numbers of the tensors whose summaries differ by more than rounding."""
    first, *others = [report[what] for report in reports.values()]
    found: list[int] = []
    for number, (one, allowed) in enumerate(zip(first, part.tolerances(), strict=True)):
        if any((one is None) is not (other[number] is None) for other in others) or (
            one is not None and any(not is_rounding(tuple(one), tuple(other[number]), allowed) for other in others)
        ):
            found.append(number)
    return found
