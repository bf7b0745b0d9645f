# SPDX-License-Identifier: Apache-2.0
"""Who started this process, and which variables say so: one ordered table, a file per environment.

No torch. Holds facts about the start only; opens nothing. Imported by ``process_group`` and the
launcher.
"""

from __future__ import annotations

from rankwise.environments.process import explicit, read_process
from rankwise.environments.rankwise import variables_for
from rankwise.environments.reading import Reading
from rankwise.environments.slurm import hosts
from rankwise.environments.table import TABLE, read

__all__ = ["TABLE", "Reading", "explicit", "hosts", "read", "read_process", "variables_for"]
