# SPDX-License-Identifier: Apache-2.0
"""Runs until it is ended; each rank writes its process id, and that of the actor of Ray above it."""

import os
import sys
import time
from pathlib import Path

import rankwise as rw
from rankwise.world.processes import stat_of

actor = os.getpid()
while (stat := stat_of(actor)) is not None and not stat.name.startswith("ray::"):
    actor = stat.parent
with rw.join() as world:
    partial = Path(sys.argv[1]) / f"partial{world.rank}"
    partial.write_text(f"{os.getpid()} {actor}")
    rw.barrier()
    partial.rename(partial.with_name(str(world.rank)))
    rw.print("all ranks run")
    while True:
        rw.barrier()
        time.sleep(0.1)
