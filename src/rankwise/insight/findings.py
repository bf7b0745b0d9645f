# SPDX-License-Identifier: Apache-2.0
"""What costs a run time: which rank the others wait for and why, or what all ranks spend too long on.

Pure: a table of steps in, findings out, the costliest first. ``words`` puts them into sentences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from rankwise.insight.network import slow_network
from rankwise.meter import BACKWARD, CHECKPOINT, DATA, EVALUATION, EXCHANGE, FORWARD, OPTIMIZER, SCRIPT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.insight.network import Link, SlowNetwork
    from rankwise.insight.step_table import Floats, StepTable

Cause = Literal[
    "data",
    "more samples",
    "shared processor",
    "stopped",
    "swapping",
    "slower",
    "longer",
    "script",
    "checkpoint",
    "evaluation",
    "update",
    "unseen",
]
"""Why one rank is slower than the others."""

LEAST_SHARE = 0.04
"""What takes a smaller share of the time is not reported."""
DOMINANT = 0.6
"""The share of all waiting that a rank or host must cause to be the one that others wait for."""
DOMINANT_OF_TWO = 0.7
"""The same with two of them, which cause half of it each by chance."""
DATA_SHARE = 0.1
EXCHANGE_SHARE = 0.2
NETWORK_SHARE = 0.5
"""If data is under way for this share of the exchange, the network is what takes the time."""
HALF = 0.5
"""What compress="bf16" leaves of the bytes."""
CHECKPOINT_SHARE = 0.05
TURNS_SHARE = 0.15
"""How much waiting for changing ranks is reported."""
MORE_SAMPLES = 1.1
LEAST_COMPUTED = 0.3
"""A rank that computes for longer, but of that for a smaller share on a processor, was kept from computing."""
LEAST_QUEUED = 0.5
"""If it was ready to run for this share of what it computes longer, other processes had the processor."""
KEPT_FROM_COMPUTING = 0.2
"""A rank that is kept from computing takes longer for everything: for computing, at least this share of it."""
LEAST_SECONDS = 1e-9
MORE_OFTEN = 2.0
FAULTS_PER_STEP = 5.0
"""Pages read from a disk in each step, from which on a rank is swapping."""

_CAUSE_OF = {DATA: "data", SCRIPT: "script", CHECKPOINT: "checkpoint", EVALUATION: "evaluation"}
_COMPUTING = (FORWARD, BACKWARD, OPTIMIZER)
MOST_OF_IT = 0.8


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that costs time."""

    kind: Literal["slow ranks", "turns", "data", "exchange", "checkpoint", "shifted"]
    share: float
    """The share of the run's time that it takes."""
    ranks: tuple[int, ...] = ()
    hostname: str = ""
    """The host of these ranks, if they are all of its ranks."""
    cause: Cause | None = None
    network: SlowNetwork | None = None
    """The links that an exchange spends its time on, where they are known."""
    step_seconds: float
    """How long a step takes now, on average."""
    predicted_seconds: float
    """How long it would take without this."""


def findings_of(table: StepTable, hostnames: Sequence[str], links: Sequence[Link] = ()) -> list[Finding]:
    """Return what costs time, the costliest first.

    Args:
        table: the steps.
        hostnames: the host of each rank of the table.
        links: what hosts have sent to each other, as far as it is known.
    """
    steady = table.steady()
    step_seconds = float(steady.seconds.mean())
    if step_seconds <= 0.0:
        return []
    if table.is_shifted:
        return [_finding(steady, "shifted", step_seconds, 0.0)]
    network = _network_of(steady, links)
    found = [*_waiting(steady, hostnames, network), *_everywhere(steady, network)]
    kept = [one for one in found if one.share >= LEAST_SHARE]
    return sorted(kept, key=lambda one: one.share, reverse=True)


def _network_of(table: StepTable, links: Sequence[Link]) -> SlowNetwork | None:
    """Return the links that the exchange spends its time on, if it is the network that takes the time."""
    network = slow_network(links)
    exchange = float(table.parts[:, :, EXCHANGE].mean(axis=1).min())
    if network is None or network.slowest.busy_seconds_per_step < NETWORK_SHARE * exchange:
        return None
    return network


def _finding(
    table: StepTable, kind: str, seconds: float, gain_seconds: float | None = None, **facts: object
) -> Finding:
    step_seconds = float(table.seconds.mean())
    return Finding(
        kind=kind,  # type: ignore[arg-type]
        share=seconds / step_seconds,
        step_seconds=step_seconds,
        predicted_seconds=step_seconds - (seconds if gain_seconds is None else gain_seconds),
        **facts,  # type: ignore[arg-type]
    )


def _waiting(table: StepTable, hostnames: Sequence[str], network: SlowNetwork | None) -> list[Finding]:
    """Return whom the ranks wait for, if it is mostly the same one."""
    if table.num_ranks == 1:
        return []
    # What a step is longer for by its slowest rank: how long the others wait for it.
    caused = table.waiting_between().sum(axis=0) / (table.num_ranks - 1)
    if network is not None and network.extent != "all":
        # Who receives over a slow link leaves each exchange last, and so is late for the next one without working more.
        caused = np.minimum(caused, _more_work(table))
    total = float(caused.sum())
    worst = int(caused.argmax())
    hosts = list(dict.fromkeys(hostnames))
    of_host = [index for index, name in enumerate(hostnames) if name == hostnames[worst]]
    by_host = float(caused[of_host].sum())
    if caused[worst] >= total * (DOMINANT if table.num_ranks > 2 else DOMINANT_OF_TWO):  # noqa: PLR2004 - a pair
        ranks, seconds, hostname = [worst], float(caused[worst]), ""
    elif len(hosts) > 1 and by_host >= total * (DOMINANT if len(hosts) > 2 else DOMINANT_OF_TWO):  # noqa: PLR2004
        ranks, seconds, hostname = of_host, by_host, hostnames[worst]
    else:
        is_much = total >= TURNS_SHARE * float(table.seconds.mean())
        return [_finding(table, "turns", total, cause=_cause_of_turns(table, total))] if is_much else []
    names = tuple(table.ranks[index] for index in ranks)
    cause = _cause_of(table, ranks)
    # A parameter cannot be divided: that update is no shorter on another rank.
    gain = 0.0 if cause == "update" else None
    return [_finding(table, "slow ranks", seconds, gain, ranks=names, hostname=hostname, cause=cause)]


def _cause_of_turns(table: StepTable, waiting: float) -> Cause | None:
    """Return why ranks wait in turn, if it is that the slowest of each step waits for a processor.

    The others of such a machine wait for theirs, too, so the slowest is not compared with them.
    """
    slowest = _work(table).argmax(axis=0)
    queued = float(table.queued[slowest, np.arange(len(slowest))].mean())
    return "shared processor" if queued >= LEAST_QUEUED * waiting else None


def _work(table: StepTable) -> Floats:
    """Return [rank, step]: the time in which a rank does not wait for others."""
    return table.seconds - table.parts[:, :, EXCHANGE]


def _more_work(table: StepTable) -> Floats:
    """Return [rank]: how much longer than the median of the others each works, in seconds per step."""
    work = _work(table).mean(axis=1)
    others = [np.median(np.delete(work, rank)) for rank in range(table.num_ranks)]
    return np.maximum(work - others, 0.0)


def _cause_of(table: StepTable, ranks: Sequence[int]) -> Cause:
    """Return why some ranks are slower than the others: what they spend more time on."""
    others = [index for index in range(table.num_ranks) if index not in ranks]
    means = table.parts.mean(axis=1)
    usual = np.median(means[others], axis=0)
    excess = means[ranks].mean(axis=0) - usual
    excess[EXCHANGE] = 0.0
    faults, of_others = _per_step(table.major_faults, ranks), _per_step(table.major_faults, others)
    if faults >= FAULTS_PER_STEP and faults >= MORE_OFTEN * of_others:
        return "swapping"
    if _is_larger_update(table, excess):
        return "update"
    # Of a model that the script has not handed to rankwise, forward is a part of the script.
    is_unseen = not table.parts[:, :, FORWARD].any()
    computing = float(excess[[*_COMPUTING, *([SCRIPT] if is_unseen else [])]].sum())
    part = max((one for one in _CAUSE_OF if one != SCRIPT or not is_unseen), key=lambda one: excess[one])
    samples, of_others = _per_step(table.samples, ranks), _per_step(table.samples, others)
    if computing >= excess[part] and samples >= MORE_SAMPLES * of_others > 0.0:
        return "more samples"
    # What a rank is kept from takes longer in proportion; beyond that, it waits for something else.
    in_proportion = usual[part] * computing / max(float(usual[list(_COMPUTING)].sum()), LEAST_SECONDS)
    is_for_another_reason = excess[part] - in_proportion > computing
    computed = _per_step(table.processor, ranks) - _per_step(table.processor, others)
    if is_unseen and computing >= excess[part]:
        queued = _per_step(table.queued, ranks) - _per_step(table.queued, others)
        return "shared processor" if queued >= LEAST_QUEUED * computing else "unseen"
    is_kept = computing >= KEPT_FROM_COMPUTING * excess.sum() and computed < LEAST_COMPUTED * computing
    if is_kept and not is_for_another_reason:
        queued = _per_step(table.queued, ranks) - _per_step(table.queued, others)
        return "shared processor" if queued >= LEAST_QUEUED * computing else "stopped"
    if computing < excess[part]:
        return _CAUSE_OF[part]  # type: ignore[return-value]
    return "slower" if samples else "longer"


def _is_larger_update(table: StepTable, excess: Floats) -> bool:
    """Return whether ranks take longer for updating parameters alone, of which each rank of a host has its own ones."""
    late = float(table.waiting_late.mean())
    longer = float(np.maximum(excess, 0.0).sum())
    return late > float(table.waiting_for_gradients.mean()) and float(excess[OPTIMIZER]) >= MOST_OF_IT * longer


def _per_step(column: object, ranks: Sequence[int]) -> float:
    return float(np.asarray(column)[ranks].mean())


def _everywhere(table: StepTable, network: SlowNetwork | None) -> list[Finding]:
    """Return what all ranks spend much of their time on, except computing."""
    seconds = float(table.seconds.mean())
    data = float(table.parts[:, :, DATA].min(axis=0).mean())
    transfer = float(table.transfer.mean())
    checkpoint = float(table.parts[:, :, CHECKPOINT].min(axis=0).mean())
    found = []
    if data >= DATA_SHARE * seconds:
        found.append(_finding(table, "data", data))
    if network is not None:
        busy = min(network.slowest.busy_seconds_per_step, float(table.parts[:, :, EXCHANGE].mean()))
        transfer = max(transfer, busy)
    if transfer >= EXCHANGE_SHARE * seconds and table.num_ranks > 1:
        found.append(_exchange(table, transfer, network))
    if checkpoint >= CHECKPOINT_SHARE * seconds:
        found.append(_finding(table, "checkpoint", checkpoint))
    return found


def _exchange(table: StepTable, seconds: float, network: SlowNetwork | None) -> Finding:
    """Return that the exchange takes long; if it is the network, what a faster one or half as many bytes would gain."""
    if network is None:
        return _finding(table, "exchange", seconds)
    left = HALF if network.extent == "all" else 1.0 / network.times_slower
    return _finding(table, "exchange", seconds, (1.0 - left) * seconds, network=network)
