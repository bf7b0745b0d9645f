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

_MEMBER = "(NODE|HOST|MACHINE|POD|TASK|RANK|REPLICA)"
_NUMBER = re.compile(
    rf"(^|_)({_MEMBER}|PROC|PROCESS|WORKER|TRAINER|ALLOC|COMPLETION)_?(INDEX|IDX)$"
    r"|(^|_)((PROC|RANK|TRAINER)_?ID|PROCNO|RANK)$"
)
_COUNT = re.compile(rf"(^|_)(WORLD_SIZE|(N|NUM_?|TOTAL_){_MEMBER}S|{_MEMBER}S?_(NUM|COUNT|TOTAL))$")
_SIZE = re.compile(r"_(SIZE|COUNT|TOTAL|NUM|N[A-Z]+S|NUM_[A-Z]+S)$")
"""A count only beside a number with the same first word: BATCH_SIZE and NUM_WORKERS are none."""
_OTHER = re.compile(
    # The rows of Slurm and rankwise know their variables. CI services number parts of tests, and members of an array
    # are jobs of their own.
    r"^(SLURM|SBATCH|SRUN|RANKWISE|CI|CIRCLE|GITHUB|BUILDKITE|PYTEST|TEST)_|ARRAY"
    # Settings of models.
    r"|(LORA|DORA|GALORE|LOW|ADAPTER|MATRIX|TENSOR|SVD|TT|PAGE)_RANK$"
)


def numbers(variables: Mapping[str, str]) -> dict[str, int]:
    """Return the variables that number this process among others."""
    return _matching(_NUMBER, variables)


def refuse(variables: Mapping[str, str]) -> None:
    """Raise if this process is one of several.

    Raises:
        ConfigurationError: a variable gives it a number above 0, or 0 of several.
    """
    own = numbers(variables)
    words = {name.split("_")[0] for name in own}
    sizes = {name: size for name, size in _matching(_SIZE, variables).items() if name.split("_")[0] in words}
    several = {name: size for name, size in {**_matching(_COUNT, variables), **sizes}.items() if size > 1}
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
    return told(variables, sorted(name for name, size in _matching(_COUNT, variables).items() if size > 1))


def _matching(pattern: re.Pattern[str], variables: Mapping[str, str]) -> dict[str, int]:
    return {
        name: int(text)
        for name, text in variables.items()
        if text.isascii() and text.isdecimal() and pattern.search(name) and not _OTHER.search(name)
    }
