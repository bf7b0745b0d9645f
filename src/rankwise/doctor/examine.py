# SPDX-License-Identifier: Apache-2.0
"""Examining this machine, or every rank of a job: join, gather, compare, and have rank 0 evaluate.

Ranks exchange facts through the job's store as JSON. Writes nothing but one file into the folder that must
be shared, and removes it. Imported by ``cli``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rankwise.comm.join import fail, join, leave
from rankwise.comm.session import current
from rankwise.doctor import gathering
from rankwise.doctor.checks import ERROR, Finding, judge
from rankwise.doctor.facts import ExaminedJob, Facts
from rankwise.errors import PeerMissing, RankwiseError
from rankwise.world.environments.process import explain_process

if TYPE_CHECKING:
    from rankwise.world.environments.reading import Reading


@dataclass(frozen=True, kw_only=True, slots=True)
class Examination:
    """The result, on one rank."""

    job: ExaminedJob
    """On ranks other than 0, of this rank only."""
    findings: tuple[Finding, ...]
    speaks: bool
    """Whether this rank prints it: rank 0, and any rank that could not report to rank 0."""


def examine(*, timeout_seconds: float, port: int = 0, shared_folder: str = "") -> Examination:
    """Examine this machine or, if a launcher started several ranks, all of their machines together.

    Called by: every rank.

    Args:
        timeout_seconds: how long to wait for the other ranks, at each step.
        port: a port that must be free on this machine; checked only if no rank was started.
        shared_folder: a folder that every host must see; empty skips the check.
    """
    explanation = explain_process()
    reading = explanation.decided
    if reading is None or reading.world_size == 1:
        source = "nobody" if reading is None else reading.source
        facts = Facts(rank=0, world_size=1, source=source, machine=gathering.machine(port))
        error = gathering.folder_error(shared_folder) if shared_folder else ""
        job = ExaminedJob(ranks=(replace(facts, across=gathering.alone(error)),), shared_folder=shared_folder)
        found = judge(job)
        if reading is None:
            what = f"cannot tell what started this process: {str(explanation.error).splitlines()[0]}"
            found.insert(0, Finding(check="launcher", level=ERROR, what=what, do="rankwise env"))
        return Examination(job=job, findings=tuple(found), speaks=True)
    return _examine_job(reading, timeout_seconds, shared_folder)


def _examine_job(reading: Reading, timeout_seconds: float, shared_folder: str) -> Examination:
    address = reading.address
    own = Facts(
        rank=reading.rank,
        world_size=reading.world_size,
        source=reading.source,
        store="" if address is None else f"{address[0]} port {address[1]}",
        machine=gathering.machine(),
    )
    alone = ExaminedJob(ranks=(own,), shared_folder="")
    try:
        world = join(timeout_seconds=timeout_seconds)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what was looked for
        speaks = reading.rank == 0 or not isinstance(error, PeerMissing) or 0 in error.ranks
        return Examination(job=alone, findings=(_told("join", error), *judge(alone)), speaks=speaks)
    try:
        job, missing = gathering.gather_job(current(), own, timeout_seconds, shared_folder)
    except Exception as error:  # noqa: BLE001 - as above
        fail(error)
        return Examination(job=alone, findings=(_told("answers", error), *judge(alone)), speaks=world.rank == 0)
    leave()
    return Examination(job=job, findings=(*missing, *judge(job)), speaks=world.rank == 0)


def _told(check: str, error: Exception) -> Finding:
    if isinstance(error, RankwiseError):
        return Finding(check=check, level=ERROR, what=error.what, do=error.do or "", evidence=error.evidence or "")
    what = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    do = "nft list ruleset\nevery host must accept connections from the others on all ports: Gloo and NCCL choose them"
    return Finding(check=check, level=ERROR, what=what, do=do)
