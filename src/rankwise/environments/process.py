# SPDX-License-Identifier: Apache-2.0
"""This process's own variables and words, handed to the pure part of this package.

The only place of rankwise that reads environment variables, but for the launcher's dictionaries of
its children. Imported by ``process_group``, through the package.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rankwise.environments import arguments, table

if TYPE_CHECKING:
    from rankwise.environments.reading import Reading

HYDRA_PROXY = "hydra_pmi_proxy"


def read_process(environment: str | None = None) -> Reading:
    """Return who started this process.

    Args:
        environment: name of the row of the table to believe, whatever the others say; ``None``
            decides.

    Raises:
        EnvironmentConflict: two environments say different things about this process.
        ConfigurationError: a set of variables is incomplete, a value is bad, or rank 0 cannot be
            reached.
    """
    launcher = _ancestor(HYDRA_PROXY) if "PMI_RANK" in os.environ else None
    return table.read(dict(os.environ), sys.argv, environment, launcher_process=launcher)


def explicit(init_method: str, rank: int | None, world_size: int | None) -> Reading:
    """Return what the user said outright; only ``env://`` looks at this process's variables.

    Args:
        init_method: ``tcp://host:port``, ``file:///path`` or ``env://``.
        rank: number of this process; with ``env://`` the variable ``RANK`` by default.
        world_size: number of processes; with ``env://`` the variable ``WORLD_SIZE`` by default.

    Raises:
        ConfigurationError: an argument is bad or missing.
    """
    return arguments.explicit(init_method, rank, world_size, variables=dict(os.environ), argv=sys.argv)


def _ancestor(name: str) -> str | None:
    """Return number and start time of the nearest process above this one called ``name``.

    Together they are never used twice until the machine starts anew. Linux only.

    Source: proc_pid_stat(5).
    """
    number = os.getppid()
    while number > 1:
        try:
            text = Path(f"/proc/{number}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
        # The name stands in parentheses and may itself hold spaces and parentheses.
        before, _, after = text.rpartition(")")
        fields = after.split()
        if before.partition("(")[2] == name:
            return f"{number}-{fields[19]}"
        number = int(fields[1])
    return None
