# SPDX-License-Identifier: Apache-2.0
"""How many processes each machine of a job has, as Slurm writes it: ``2(x3),1`` is 2, 2, 2, 1.

Pure. Imported by the rows of this package.
"""

from __future__ import annotations

import re
from itertools import groupby
from typing import TYPE_CHECKING

from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable


def parse_counts(text: str, name: str) -> list[int]:
    """Return the number of each machine; ``name`` is the variable that holds the list.

    Raises:
        ConfigurationError: the list cannot be read.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", part)
        if match is None:
            raise ConfigurationError(f"{name}={text!r} cannot be read.", do="it should look like 2(x3),1")
        counts.extend([int(match[1])] * int(match[2] or 1))
    return counts


def format_counts(counts: Iterable[int]) -> str:
    """Return the list as one text, equal neighbours folded."""
    folded = [(count, len(list(equal))) for count, equal in groupby(counts)]
    return ",".join(str(count) if number == 1 else f"{count}(x{number})" for count, number in folded)
