# SPDX-License-Identifier: Apache-2.0
"""What started this process, and which variables show it: one ordered table, a file per environment.

No torch. Determines only facts about the start; opens nothing. Used by ``join`` and by the launcher.
"""

from __future__ import annotations

from rankwise.world.environments.process import (
    asked_torch_store,
    checks_collectives,
    explain_process,
    explicit,
    in_kubernetes,
    job_of_process,
    nodes_of_job,
    note_echo,
    read_launcher,
    read_process,
    set_horovod_variables,
    slurm_variables_for,
    stack_file,
)
from rankwise.world.environments.rankwise import echo_note, variables_for
from rankwise.world.environments.reading import Reading
from rankwise.world.environments.slurm import hosts
from rankwise.world.environments.table import TABLE, read

__all__ = [
    "TABLE",
    "Reading",
    "asked_torch_store",
    "checks_collectives",
    "echo_note",
    "explain_process",
    "explicit",
    "hosts",
    "in_kubernetes",
    "job_of_process",
    "nodes_of_job",
    "note_echo",
    "read",
    "read_launcher",
    "read_process",
    "set_horovod_variables",
    "slurm_variables_for",
    "stack_file",
    "variables_for",
]
