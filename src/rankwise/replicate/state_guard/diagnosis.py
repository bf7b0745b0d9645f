# SPDX-License-Identifier: Apache-2.0
"""Finds the difference between replicas whose checksums differ: their state, exchanged in full, within rounding.

Its result is final, not the checksums. Every rank exchanges the same and gets the same result. Used by guard, whose
steps also compare the facts here: named integers that other rooms add, such as the state of a random number generator.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rankwise.comm.collectives.group import gather_bytes
from rankwise.comm.same_state import first_unlike_setting, furthest_apart, largest_element, listed
from rankwise.comm.session import current
from rankwise.errors import ReplicasDiffer, fold_values
from rankwise.tensors.checksum import checksums_of_each, settings_in

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rankwise.comm.backends.protocol import Exchange


@dataclass(frozen=True, slots=True)
class DivergedReplicas:
    """A rank's facts about replicas whose checksums differ."""

    model_name: str
    parameters: list[str]
    """Names, by number."""
    groups: Sequence[dict[str, Any]]
    """Parameter groups of the optimizers that have stepped since ranks last compared settings, in JSON-able form."""
    used: Mapping[str, Sequence[bytes]]
    """What each of their steps has used, by the optimizer: see UsedSettings."""
    facts: Sequence[tuple[SharedFact, int | None]]
    """Each with its number at the time of this rank's report."""
    tensors: Mapping[str, torch.Tensor]
    """The tensors to compare by value; empty in a step that compares none."""
    since: int
    """The number, from 1, of the step in which ranks last compared settings."""
    step: int
    """The number of this one."""


def diagnose(replicas: DivergedReplicas, exchange: Exchange) -> tuple[bool, bool]:
    """Return whether values differ by rounding, and whether a fact was made equal; raise for any other difference.

    Called by: every rank of ``exchange``.

    Raises:
        ReplicasDiffer: the same on every rank.
    """
    tensors = list(replicas.tensors.values())
    own = {
        "rank": current().world.rank,
        "facts": {fact.name: number for fact, number in replicas.facts},
        "groups": list(replicas.groups),
        "used": plain(replicas.used),
        "checksums": checksums_of_each(tensors),
        "largest": max(map(largest_element, tensors), default=0.0),
    }
    found = gather_bytes(exchange, json.dumps(own).encode(), f"state of {replicas.model_name}")
    reports = [json.loads(one) for one in found]
    _check_steps(replicas.model_name, reports, replicas.since, f" before step {replicas.step}")
    _check_groups(replicas, reports)
    check_used(replicas.model_name, reports, replicas.since)
    is_repaired = _check_facts(replicas, exchange, reports)
    return _check_values(replicas, exchange, reports), is_repaired


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
        of_ranks = [report["used"].get(optimizer, steps) for report in reports]
        for step in range(len(steps)):
            unlike = first_unlike_setting(one[step] if step < len(one) else [] for one in of_ranks)
            if unlike is not None:
                _, key, held = unlike
                raise _differ(
                    f"{key} of {optimizer.partition('/')[0]} was not the same on all ranks in optimizer step "
                    f"{step + 1} of {model_name} since step {since}.",
                    _folded(reports, held),
                    _instead_of(key),
                )


def _check_steps(model_name: str, reports: Sequence[dict[str, Any]], since: int, until: str) -> None:
    numbers = [sum(map(len, report["used"].values())) for report in reports]
    if len(set(numbers)) > 1:
        raise _differ(
            f"Ranks have stepped the optimizers of {model_name} a different number of times{until}.",
            _folded(reports, [_times(number, since) for number in numbers]),
            "decide for all ranks together whether to step: skip = rankwise.all_reduce(float(is_bad), 'max') > 0",
        )


def _times(number: int, since: int) -> str:
    return f"{number} optimizer {'step' if number == 1 else 'steps'} since step {since}"


def _check_groups(replicas: DivergedReplicas, reports: Sequence[dict[str, Any]]) -> None:
    """Raise if a hyperparameter of a parameter is not the same on all ranks that step it."""
    by_rank = [{n: group for group in report["groups"] for n in group["parameters"]} for report in reports]
    for number, own in by_rank[0].items():
        of_ranks = [one.get(number, own) for one in by_rank]
        optimizer = own["optimizer"]
        if any(one["optimizer"] != optimizer for one in of_ranks):
            continue
        unlike = first_unlike_setting([one["values"]] for one in of_ranks)
        if unlike is not None:
            _, key, held = unlike
            raise _differ(
                f"{key} of {optimizer} is not the same on all ranks before step {replicas.step}: ranks would "
                f"train {replicas.parameters[number]} of {replicas.model_name} differently.",
                _folded(reports, held),
                _instead_of(key),
            )


def _instead_of(key: str) -> str:
    if key == "lr":
        return (
            "pass a value that is the same on all ranks to the scheduler: scheduler.step(rankwise.mean(loss, "
            "num_samples)) instead of this rank's own loss"
        )
    return f"set {key} from a value that is the same on all ranks, and load the optimizer's state on all of them"


def _check_facts(replicas: DivergedReplicas, exchange: Exchange, reports: Sequence[dict[str, Any]]) -> bool:
    """Return whether facts differed that were repaired, or that not every rank has yet; raise for others."""
    is_repaired = False
    for fact, _ in replicas.facts:
        held = [report["facts"].get(fact.name) for report in reports]
        if len(set(held)) == 1:
            continue
        if None in held:
            is_repaired = True
            continue
        if isinstance(fact.repair, str):
            raise _differ(
                f"{fact.name} is not the same on all ranks in step {replicas.step} of {replicas.model_name}.",
                _folded(reports, [f"checksum {one:x}" for one in held]),
                fact.repair,
            )
        fact.repair.apply(exchange, is_expected=False)
        is_repaired = True
    return is_repaired


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
                f"{replicas.step}.",
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
    return f"{len(unlike)} of {len(replicas.tensors)} differ: {listed(unlike)}"


def _cause(replicas: DivergedReplicas, name: str, reports: Sequence[dict[str, Any]]) -> str:
    kind, _, own_name = name.partition(" ")
    if replicas.step == 1:
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


# -- facts that ranks compare with their settings -----------------------------------------------------


FACT_MASK = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Repair:
    """How a fact is made equal on all ranks again."""

    apply: Callable[..., None]
    """Makes it equal, given an exchange and the keyword ``is_expected``. Called by: every rank that compares."""
    is_expected: Callable[[], bool]
    """Returns whether ranks differ in the step under way, which all of them know without comparing."""


@dataclass(frozen=True, slots=True)
class SharedFact:
    """An integer that must be the same on all ranks; see :func:`add_fact`."""

    name: str
    read: Callable[[], int | None]
    repair: Repair | str

    def number(self) -> int | None:
        """Return its current value, in 63 bits; ``None``: nothing to compare yet."""
        value = self.read()
        return None if value is None else value & FACT_MASK


shared_facts: dict[str, SharedFact] = {}
"""In the order of their names, which is the same on every rank."""


def add_fact(name: str, read: Callable[[], int | None], repair: Repair | str) -> None:
    """Have ranks compare an integer with their settings, from the next step on, until :func:`forget_facts`.

    Called by: every rank, between the same two steps. A fact of the same name is replaced.

    Args:
        name: starts the sentence of an error: ``The state of torch's random number generator``.
        read: returns the integer within microseconds, without waiting for a device or for other ranks; ``None``: there
            is nothing to compare yet.
        repair: the user's fix for a difference, for the error; or a way to make it equal again without an error.
    """
    facts = {**shared_facts, name: SharedFact(name, read, repair)}
    shared_facts.clear()
    shared_facts.update(sorted(facts.items()))


def forget_facts() -> None:
    """Stop comparing facts. Called when the world is left."""
    shared_facts.clear()
