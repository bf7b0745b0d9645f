# SPDX-License-Identifier: Apache-2.0
"""Finds differences between ranks of a hand-written script, from what each has posted. Values only.

Used by ``ranks``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rankwise.errors import ReplicasDiffer, fold_values
from rankwise.tensors.checksum import is_same_setting
from rankwise.tensors.rounding import is_rounding

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rankwise.launch.replica_guard.schedule import Stepped

Report = dict[str, Any]
"""The report of one rank: summaries of values and gradients, and the parameter groups' hyperparameters."""

MOST_NAMES = 5


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
    """Return the first thing that ranks differ in by more than rounding; ``None`` if there is none.

    Args:
        reports: of each rank.
        part: the compared tensors of this rank.
        optimizer: its class.
        num_steps: number of its steps.
    """
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
