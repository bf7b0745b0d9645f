# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a host compare before they update one copy: a part of each would be lost if they differed."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankwise.errors import ReplicasDiffer, fold_values
from rankwise.tensors.checksum import checksums_of_each, combined

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    Meet = Callable[[Sequence[int]], list[list[int]]]
    """Exchanges numbers between the ranks of the host."""


@dataclass(frozen=True, slots=True)
class Compared:
    """Tensors that are the same on all ranks, by name."""

    what: str
    """What they are, for the error: ``"The gradient of"``."""
    do: str
    tensors: dict[str, torch.Tensor]

    def checksum(self) -> int:
        """Return a checksum of names and values; 0 if there are none."""
        if not self.tensors:
            return 0
        names = [hash_of(name) for name in self.tensors]
        return combined([*names, *checksums_of_each(list(self.tensors.values()))]) + 1

    def difference(self, ranks: Sequence[int], meet: Meet, when: str) -> ReplicasDiffer | None:
        """Return the error that names the first tensor that differs, if one does.

        Called by: every rank of the host.
        """
        names = sorted(self.tensors)
        counts = [row[0] for row in meet([len(names)])]
        if len(set(counts)) > 1:
            texts = [f"has {count} of them" if count else "has none" for count in counts]
            return self._error("some parameter", when, dict(zip(ranks, texts, strict=True)))
        found = [
            combined([hash_of(name), one])
            for name, one in zip(names, checksums_of_each([self.tensors[name] for name in names]), strict=True)
        ]
        if len({row[0] for row in meet([combined(found)])}) == 1:
            return None
        # The first that differs is after the longest beginning that agrees.
        low, high = 0, len(names) - 1
        while low < high:
            middle = (low + high) // 2
            rows = meet([combined(found[: middle + 1])])
            low, high = (low, middle) if len({row[0] for row in rows}) > 1 else (middle + 1, high)
        norms = meet([struct.unpack("=q", struct.pack("=d", self.tensors[names[low]].abs().double().norm().item()))[0]])
        values = [struct.unpack("=d", struct.pack("=q", row[0]))[0] for row in norms]
        return self._error(names[low], when, {r: f"norm {v!r}" for r, v in zip(ranks, values, strict=True)})

    def _error(self, name: str, when: str, texts: dict[int, str]) -> ReplicasDiffer:
        return ReplicasDiffer(
            f"{self.what} {name} is not the same on all ranks before {when}.", evidence=fold_values(texts), do=self.do
        )


def hash_of(name: str) -> int:
    """Return a number for a name, the same on every rank."""
    return combined(list(name.encode()))


def written(tensors: dict[str, torch.Tensor]) -> Compared:
    """Return parameters that a script has written since the last step."""
    return Compared(
        "Parameter",
        "change parameters on every rank alike: call load_state_dict() on every rank, or rankwise.load()",
        tensors,
    )


def gradients(tensors: dict[str, torch.Tensor]) -> Compared:
    """Return the gradients that the step is about to use."""
    return Compared(
        "The gradient of",
        "change gradients on every rank alike: by the norm of the gradients, not by a rank's own loss",
        tensors,
    )


def state(tensors: dict[str, torch.Tensor]) -> Compared:
    """Return the state that the optimizer has been given."""
    return Compared(
        "The optimizer's state of",
        "call optimizer.load_state_dict() on every rank with the same state, or rankwise.load()",
        tensors,
    )
