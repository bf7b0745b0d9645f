# SPDX-License-Identifier: Apache-2.0
"""Finds the difference between replicas whose checksums differ: their state, exchanged in full, within rounding.

Its result is final, not the checksums. Every rank exchanges the same and gets the same result. Used by guard.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from rankwise.comm.collectives.objects import gather_bytes
from rankwise.comm.session import current
from rankwise.errors import ReplicasDiffer, fold_values
from rankwise.tensors.checksum import checksums_of_each, is_same_setting, settings_in
from rankwise.tensors.rounding import FLOOR, tolerance

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rankwise.comm.backends.protocol import Exchange


MOST_NAMES = 5
CHUNK_ELEMENTS = 2**22
"""How much of a tensor is exchanged at a time."""


class PutRight(Protocol):
    """Makes a fact the same on all ranks."""

    def __call__(self, ranks: Exchange, *, is_expected: bool) -> None:
        """Make it so, with a warning unless the difference was expected. Called by: every rank that compares."""
        ...


class HeldFact(NamedTuple):
    """A fact (see :func:`rankwise.parallel.state_guard.guard.add_fact`) at the time of this rank's report."""

    name: str
    number: int | None
    """``None``: nothing to compare yet."""
    repair: PutRight | str


@dataclass(frozen=True, slots=True)
class DivergedReplicas:
    """A rank's facts about replicas whose checksums differ."""

    model_name: str
    parameters: list[str]
    """Names, by number."""
    num_optimizer_steps: int
    """Since ranks last compared settings."""
    groups: Sequence[dict[str, Any]]
    """Parameter groups of those optimizers, in JSON-able form."""
    used: Mapping[str, Sequence[bytes]]
    """What each of those steps has used, by the optimizer: see UsedSettings."""
    facts: Sequence[HeldFact]
    tensors: Mapping[str, torch.Tensor]
    """The tensors to compare by value; empty in a step that compares none."""
    steps: tuple[int, int]
    """The numbers, from 1, of the step in which ranks last compared settings, and of this one."""

    @property
    def num_steps(self) -> int:
        """The number of the step, from 1."""
        return self.steps[1]


class Harmless(Enum):
    """The finding if replicas have not diverged."""

    ROUNDING = auto()
    """Values differ by rounding."""
    PUT_RIGHT = auto()
    """A fact differed, and is equal again."""
    NOTHING = auto()


def diagnose(replicas: DivergedReplicas, exchange: Exchange) -> Harmless:
    """Return the kind of a difference that is harmless or was put right; raise for any other.

    Called by: every rank of ``exchange``.

    Raises:
        ReplicasDiffer: the same on every rank.
    """
    tensors = list(replicas.tensors.values())
    own = {
        "rank": current().world.rank,
        "facts": {fact.name: fact.number for fact in replicas.facts},
        "steps": replicas.num_optimizer_steps,
        "groups": list(replicas.groups),
        "used": plain(replicas.used),
        "checksums": checksums_of_each(tensors),
        "largest": max(map(largest_element, tensors), default=0.0),
    }
    found = gather_bytes(exchange, json.dumps(own).encode(), f"state of {replicas.model_name}")
    reports = [json.loads(one) for one in found]
    since, step = replicas.steps
    _check_steps(replicas.model_name, reports, since, f" before step {step}")
    _check_groups(replicas, reports)
    check_used(replicas.model_name, reports, since)
    is_put_right = _check_facts(replicas, exchange, reports)
    if _check_values(replicas, exchange, reports):
        return Harmless.ROUNDING
    return Harmless.PUT_RIGHT if is_put_right else Harmless.NOTHING


def plain(used: Mapping[str, Sequence[bytes]]) -> dict[str, list[list[dict[str, Any]]]]:
    """Return what steps have used in JSON-able form: for each step the values of each parameter group."""
    return {key: [settings_in(one) for one in steps] for key, steps in used.items()}


def check_used(model_name: str, reports: Sequence[dict[str, Any]], since: int) -> None:
    """Raise if ranks have stepped unequally often since step ``since``, or a step has used unequal values.

    Raises:
        ReplicasDiffer: the same for the same reports.
    """
    _check_steps(model_name, reports, since, "")
    for optimizer, steps in reports[0]["used"].items():
        others = [report["used"].get(optimizer, steps) for report in reports]
        places = [
            (step, group, key)
            for step, groups in enumerate(steps)
            for group, values in enumerate(groups)
            for key in values
        ]
        for step, group, key in places:
            of_ranks = [one[step][group] if step < len(one) and group < len(one[step]) else {} for one in others]
            value = steps[step][group][key]
            held = [one.get(key, value) for one in of_ranks]
            if any(not is_same_setting(one, value) for one in held):
                raise _differ(
                    f"{key} of {optimizer.partition('/')[0]} was not the same on all ranks in optimizer step "
                    f"{step + 1} of {model_name} since step {since}.",
                    _folded(reports, held),
                    _instead_of(key),
                )


def _check_steps(model_name: str, reports: Sequence[dict[str, Any]], since: int, until: str) -> None:
    if len({report["steps"] for report in reports}) > 1:
        raise _differ(
            f"Ranks have stepped the optimizers of {model_name} a different number of times{until}.",
            _folded(reports, [_times(report["steps"], since) for report in reports]),
            "decide for all ranks together whether to step: skip = rankwise.all_reduce(float(is_bad), 'max') > 0",
        )


def _times(number: int, since: int) -> str:
    return f"{number} optimizer {'step' if number == 1 else 'steps'} since step {since}"


def _check_groups(replicas: DivergedReplicas, reports: Sequence[dict[str, Any]]) -> None:
    """Raise if a hyperparameter of a parameter is not the same on all ranks that step it."""
    by_rank = [_by_parameter(report["groups"]) for report in reports]
    for number, (optimizer, values) in by_rank[0].items():
        others = [one.get(number, (optimizer, values)) for one in by_rank]
        for key in values:
            held = [own.get(key, values[key]) for _, own in others]
            if all(name == optimizer for name, _ in others) and any(not is_same_setting(one, held[0]) for one in held):
                raise _differ(
                    f"{key} of {optimizer} is not the same on all ranks before step {replicas.num_steps}: ranks would "
                    f"train {replicas.parameters[number]} of {replicas.model_name} differently.",
                    _folded(reports, held),
                    _instead_of(key),
                )


def _by_parameter(groups: Sequence[dict[str, Any]]) -> dict[int, tuple[str, dict[str, Any]]]:
    return {number: (group["optimizer"], group["values"]) for group in groups for number in group["parameters"]}


def _instead_of(key: str) -> str:
    if key == "lr":
        return (
            "pass a value that is the same on all ranks to the scheduler: scheduler.step(rankwise.mean(loss, "
            "num_samples)) instead of this rank's own loss"
        )
    return f"set {key} from a value that is the same on all ranks, and load the optimizer's state on all of them"


def _check_facts(replicas: DivergedReplicas, exchange: Exchange, reports: Sequence[dict[str, Any]]) -> bool:
    """Return whether facts differed that were put right, or that not every rank has yet; raise for others."""
    is_put_right = False
    for fact in replicas.facts:
        held = [report["facts"].get(fact.name) for report in reports]
        if len(set(held)) == 1:
            continue
        if None in held:
            is_put_right = True
            continue
        if isinstance(fact.repair, str):
            raise _differ(
                f"{fact.name} is not the same on all ranks in step {replicas.num_steps} of {replicas.model_name}.",
                _folded(reports, [f"checksum {one:x}" for one in held]),
                fact.repair,
            )
        fact.repair(exchange, is_expected=False)
        is_put_right = True
    return is_put_right


def _check_values(replicas: DivergedReplicas, exchange: Exchange, reports: Sequence[dict[str, Any]]) -> bool:
    """Return whether tensors differ by rounding; raise if one differs by more."""
    checksums = zip(*(report["checksums"] for report in reports), strict=True)
    unlike = [name for name, held in zip(replicas.tensors, checksums, strict=True) if len(set(held)) > 1]
    largest = max(report["largest"] for report in reports)
    for name in unlike:
        tensor = replicas.tensors[name]
        index = furthest_apart(tensor, exchange, name=name, largest=largest)
        if index is not None:
            held = exchange.all_gather(tensor.reshape(-1)[index : index + 1].cpu(), what=f"an element of {name}")
            raise _differ(
                f"{name[0].upper()}{name[1:]} of {replicas.model_name} is not the same on all ranks in step "
                f"{replicas.num_steps}.",
                f"{_element(name, tensor, index)}\n{_folded(reports, held.flatten().tolist())}\n"
                f"{_how_many(replicas, unlike)}",
                _cause(replicas, name, reports),
            )
    return bool(unlike)


def _element(name: str, tensor: torch.Tensor, index: int) -> str:
    own_name = name.partition(" ")[2]
    if not tensor.dim():
        return f"{own_name} on"
    position = torch.unravel_index(torch.tensor(index), tensor.shape)
    return f"{own_name}[{', '.join(str(int(one)) for one in position)}] on"


def _how_many(replicas: DivergedReplicas, unlike: Sequence[str]) -> str:
    if len(unlike) == 1:
        return (
            f"the other {len(replicas.tensors) - 1} are the same on all" if len(replicas.tensors) > 1 else "it is alone"
        )
    names = ", ".join(unlike[:MOST_NAMES]) + (", ..." if len(unlike) > MOST_NAMES else "")
    return f"{len(unlike)} of {len(replicas.tensors)} differ: {names}"


def _cause(replicas: DivergedReplicas, name: str, reports: Sequence[dict[str, Any]]) -> str:
    kind, _, own_name = name.partition(" ")
    if replicas.num_steps == 1:
        return "load or change weights before replicate(), or after it on every rank"
    if kind == "buffer":
        return "make the same change on every rank, and load checkpoints on every rank"
    stepped = Counter(number for report in reports for group in report["groups"] for number in group["parameters"])
    if stepped and replicas.parameters.index(own_name) not in stepped:
        return (
            "no optimizer has stepped it, so the script changes it, perhaps from this rank's own samples: apply "
            "the same update on every rank: update = rankwise.all_reduce(update, 'mean')"
        )
    return (
        "load weights and the optimizer's state on every rank; if the script changes weights itself (under "
        "no_grad, or gradients after backward), apply the same update on every rank: "
        "rankwise.all_reduce(update, 'mean')"
    )


def _folded(reports: Sequence[dict[str, Any]], held: Sequence[object]) -> str:
    return fold_values({report["rank"]: value for report, value in zip(reports, held, strict=True)})


def _differ(what: str, evidence: str, do: str) -> ReplicasDiffer:
    return ReplicasDiffer(what, where=f"reported on {current().world}", evidence=evidence, do=do)


def furthest_apart(tensor: torch.Tensor, exchange: Exchange, *, name: str, largest: float) -> int | None:
    """Return the index of the element that ranks differ most in; ``None`` if they differ by rounding at most.

    ``largest`` is the largest element of the model. Called by: every rank of ``exchange``, with the same result.
    """
    apart, index = _furthest_from_first(tensor.reshape(-1), exchange, name)
    own = torch.tensor([apart, float(index), largest_element(tensor)], dtype=torch.float64)
    rows = exchange.all_gather(own, what=f"the difference of {name}").tolist()
    furthest = max(rows, key=lambda row: row[0])
    allowed = tolerance(tensor.dtype) * max(FLOOR * largest, *(row[2] for row in rows))
    return int(furthest[1]) if furthest[0] > allowed else None


def _furthest_from_first(flat: torch.Tensor, exchange: Exchange, name: str) -> tuple[float, int]:
    """Return the largest difference of this rank's values from the first rank's, and its index: NaN equals NaN."""
    furthest, place = 0.0, 0
    for start in range(0, flat.numel(), CHUNK_ELEMENTS):
        own = flat[start : start + CHUNK_ELEMENTS].contiguous()
        first = exchange.broadcast(own, 0, what=f"{name} of the first rank")
        apart, index = furthest_from(own, first)
        if apart > furthest:
            furthest, place = apart, start + index
    return furthest, place


def furthest_from(own: torch.Tensor, first: torch.Tensor) -> tuple[float, int]:
    """Return the largest difference of two tensors of one dim, and its index: NaN equals NaN."""
    if not own.numel():
        return 0.0, 0
    wide = torch.complex128 if own.is_complex() else torch.float64
    mine, other = own.cpu().to(wide), first.cpu().to(wide)
    is_equal = (mine == other) | (mine.isnan() & other.isnan())
    apart = torch.where(is_equal, 0.0, (mine - other).abs()).nan_to_num(nan=math.inf)
    index = int(apart.argmax())
    return float(apart[index]), index


def largest_element(tensor: torch.Tensor) -> float:
    """Return the largest finite element of a tensor, without its sign."""
    if not tensor.numel() or not (tensor.is_floating_point() or tensor.is_complex()):
        return 0.0
    return float(tensor.abs().nan_to_num(nan=0.0, posinf=0.0).max())
