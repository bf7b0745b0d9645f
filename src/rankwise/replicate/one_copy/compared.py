# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a host compare before they update one copy: a part of each would be lost if they differed.

In every step one number for each kind of tensors; where it differs, a checksum and the norm of each tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rankwise.errors import ReplicasDiffer, fold_values
from rankwise.tensors.checksum import checksums_of_each, combined

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    Tensors = Mapping[str, torch.Tensor]
    """By their names in messages."""


def checksum_of(tensors: Tensors) -> int:
    """Return a checksum of names and values; 0 if there are none."""
    if not tensors:
        return 0
    return combined([*map(hash_of, tensors), *checksums_of_each(list(tensors.values()))]) + 1


def details_of(tensors: Tensors) -> dict[str, tuple[int, float]]:
    """Return the checksum and the norm of each tensor, in a form for JSON."""
    checksums = checksums_of_each(list(tensors.values()))
    norms = [one.abs().double().norm().item() for one in tensors.values()]
    return dict(zip(tensors, zip(checksums, norms, strict=True), strict=True))


def hash_of(name: str) -> int:
    """Return a number for a name, the same on every rank."""
    return combined(list(name.encode()))


@dataclass(frozen=True, slots=True)
class Kind:
    """Tensors that must be the same on all ranks of a host: what they are in errors, and the fix."""

    what: str
    do: str

    def difference(self, reports: Mapping[int, Mapping[str, Any]], when: str) -> ReplicasDiffer | None:
        """Return the error for the first tensor that differs between the details of ranks, if one does."""
        for name in sorted({name for report in reports.values() for name in report}):
            found = {rank: report.get(name) for rank, report in reports.items()}
            if len({None if one is None else one[0] for one in found.values()}) > 1:
                held = {rank: "none" if one is None else f"norm {one[1]!r}" for rank, one in found.items()}
                what = f"{self.what} {name} is not the same on all ranks before {when}."
                return ReplicasDiffer(what, evidence=fold_values(held), do=self.do)
        return None


KINDS = (
    Kind(
        "Parameter", "change parameters on every rank alike: call load_state_dict() on every rank, or rankwise.load()"
    ),
    Kind(
        "The gradient of",
        "change gradients on every rank alike: by the norm of the gradients, not by a rank's own loss",
    ),
    Kind(
        "The optimizer's state of",
        "call optimizer.load_state_dict() on every rank with the same state, or rankwise.load()",
    ),
)
"""Parameters that a script has written since the last step; gradients that the step is about to use; and the state
that the optimizer has been given."""
