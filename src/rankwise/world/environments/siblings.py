# SPDX-License-Identifier: Apache-2.0
"""Signs that this process is one of several of a job, in variables that no row of the table knows.

Reads variables from a mapping. A variable counts by its name: one that numbers a node, a task, a rank and the like, or
that says how many there are.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rankwise.errors import ConfigurationError
from rankwise.world.environments.reading import told

if TYPE_CHECKING:
    from collections.abc import Mapping

# Source: pbsdsh(1); blaunch in IBM Spectrum LSF's command reference, and PRRTE's component for LSF, which says that its
# tasks count from 1; HTCondor's parallel universe; docs/env.md of bytedance/byteps; aprun's
# environment as libfabric's provider for Cray reads it; scripts for NVIDIA Base Command.
_MEMBER = "(NODE|HOST|MACHINE|POD|TASK|RANK|REPLICA)"
_NUMBER = re.compile(
    rf"(^|_)({_MEMBER}|PROC|PROCESS|WORKER|TRAINER|ALLOC|COMPLETION)_?(INDEX|IDX)$"
    r"|(^|_)((PROC|RANK|TRAINER)_?ID|PROCNO)$|^RANK$"
    rf"|(^|_)({_MEMBER}|PROC|PROCESS|WORKER|TRAINER|LOCAL|GLOBAL|WORLD|JOB|GROUP)_?RANK$"
    r"|^(PBS_V?NODENUM|LSF_PM_TASKID|ALPS_APP_PE|NGC_ARRAY_INDEX)$"
)
_FIRST = {"PBS_NODENUM": 0, "PBS_VNODENUM": 0, "LSF_PM_TASKID": 1}
"""Numbers of the first of several that the only process of a batch job may have too."""
_MAYBE = re.compile(r"_RANK$")
"""A number only below a count: models too have ranks, as NETWORK_RANK=32."""
_ID = re.compile(r"(^|_)(NODE|HOST|MACHINE|POD|REPLICA|PROCESS|WORKER)_ID$")
"""A number only below its own count, as REPLICA_ID=1 below NUM_REPLICAS=2; NUM_WORKERS is a loader's setting."""
_COUNT = re.compile(rf"(^|_)(WORLD_SIZE|(N|NUM_?|TOTAL_){_MEMBER}S|{_MEMBER}S?_(NUM|COUNT|TOTAL))$|^VC_[A-Z]+_NUM$")
_TASKS_OF_LSF = re.compile("^LSB_DJOB_NUMPROC$")
_OTHER = re.compile(
    # The rows of Slurm and rankwise know their variables. CI services number parts of tests, and members of an array
    # are jobs of their own, as are tasks of Google's Batch and Cloud Run; those of NVIDIA Base Command are one job.
    r"^(SLURM|SBATCH|SRUN|RANKWISE|CIRCLE|GITHUB|BUILDKITE|PYTEST|TEST|HARNESS|BATCH_TASK|CLOUD_RUN)_|(^|_)CI_"
    r"|(?<!^NGC_)ARRAY"
    # Settings of models.
    r"|(LORA|DORA|GALORE|LOW|ADAPTER|NETWORK|KV|MATRIX|TENSOR|SVD|TT|PAGE)_RANK$"
)
_OF_MPI = {"PMIX_RANK", "OMPI_COMM_WORLD_NODE_RANK"}
"""Set next to the numbers that the rows of MPI judge."""


def numbers(variables: Mapping[str, str]) -> dict[str, int]:
    """Return the variables that number this process among others."""
    return _numbers_and_counts(variables)[0]


def refuse(variables: Mapping[str, str]) -> None:
    """Raise if this process is one of several.

    Raises:
        ConfigurationError: a variable gives it a number above 0, or 0 of several.
    """
    own, several = _numbers_and_counts({name: text for name, text in variables.items() if name not in _OF_MPI})
    if own and (several or any(own.values())):
        raise ConfigurationError(
            "This process seems to be one of several of a job, but no variable that rankwise knows tells how they find "
            "each other.",
            evidence=told(variables, sorted({**own, **several})),
            do="on each machine: rankwise run --nodes <their number> --rendezvous <first machine>:29400 train.py\n"
            "or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each process\n"
            "or set RANKWISE_ALONE=1, if this process trains a model of its own",
        )


def counts(variables: Mapping[str, str]) -> str:
    """Return the variables that count several processes, as a text; empty if there are none."""
    # Where no task has a number, it counts the cores of a job.
    tasks = _several(_TASKS_OF_LSF, variables) if variables.get("LSF_PM_TASKID") else {}
    return told(variables, sorted(_several(_COUNT, variables) | tasks))


def _numbers_and_counts(variables: Mapping[str, str]) -> tuple[dict[str, int], dict[str, int]]:
    own: dict[str, int] = {}
    several = _several(_COUNT, variables)
    numbers = {**_matching(_NUMBER, variables), **_matching(_MAYBE, variables), **_matching(_ID, variables)}
    for name, number in numbers.items():
        if number == _FIRST.get(name):
            continue
        counts = _several(_counts_of(name), variables)
        beside = counts if _ID.search(name) else several | counts
        if _NUMBER.search(name) or any(number < count for count in beside.values()):
            own[name] = number
            several |= beside
    return own, several


def _counts_of(name: str) -> re.Pattern[str]:
    """Return what the count for a number is called: ACME_SIZE or ACME_NPROCS for ACME_RANK, but BATCH_SIZE for none."""
    words = re.escape(re.sub(r"_?(INDEX|IDX|ID|RANK|PROCNO)$", "", name))
    before, _, last = words.rpartition("_")
    if not last:
        return re.compile("^$")
    turned = rf"{before}_(N|NUM_?|TOTAL_){last}(S|ES)?" if before else rf"(N|NUM_|TOTAL_){last}(S|ES)"
    plural = f"|{words}S" if _ID.search(name) else ""
    return re.compile(
        rf"^(?!NUM_WORKERS$)({words}(S|ES)?_(WORLD_SIZE|SIZE|TOTAL|COUNT|NUM)|{words}_NPROCS|{turned}{plural})$"
    )


def _several(pattern: re.Pattern[str], variables: Mapping[str, str]) -> dict[str, int]:
    return {name: count for name, count in _matching(pattern, variables).items() if count > 1}


def _matching(pattern: re.Pattern[str], variables: Mapping[str, str]) -> dict[str, int]:
    return {
        name: int(text)
        for name, text in variables.items()
        if text.isascii() and text.isdecimal() and pattern.search(name) and not _OTHER.search(name)
    }
