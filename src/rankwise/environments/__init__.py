# SPDX-License-Identifier: Apache-2.0
"""Who started this process, and which variables say so: one ordered table, a file per environment.

No torch. Holds facts about the start only; opens nothing. Imported by ``process_group`` and the
launcher.
"""

from __future__ import annotations

from rankwise.environments.process import (
    asked_torch_store,
    checks_collectives,
    explain_process,
    explicit,
    in_kubernetes,
    job_of_process,
    nodes_of_job,
    read_launcher,
    read_process,
    set_horovod_variables,
    slurm_variables_for,
    stack_file,
)
from rankwise.environments.rankwise import variables_for
from rankwise.environments.reading import Reading
from rankwise.environments.slurm import hosts
from rankwise.environments.table import TABLE, read

__all__ = [
    "TABLE",
    "Reading",
    "asked_torch_store",
    "checks_collectives",
    "explain_process",
    "explicit",
    "hosts",
    "in_kubernetes",
    "job_of_process",
    "nodes_of_job",
    "read",
    "read_launcher",
    "read_process",
    "set_horovod_variables",
    "slurm_variables_for",
    "stack_file",
    "variables_for",
]
