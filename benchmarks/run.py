# SPDX-License-Identifier: Apache-2.0
"""Run every benchmark, one after the other, and print one table: `make bench`.

Arguments: words; only benchmarks with one of them in their name (`make bench ONLY=step`). Every benchmark's rows are
printed on stderr as it ends: a run that is interrupted after half an hour has not lost what it measured.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from measure import Row, machine, table

BENCHMARKS = (
    "start_time.py",
    "launch_function.py",
    "recovery.py",
    "train_step.py",
    "auto.py",
    "loss_reading.py",
    "random_numbers.py",
    "exchange_step.py",
    "step_with_workers.py",
    "one_copy_memory.py",
    "moved_step.py",
    "flight_recorder.py",
    "state_guard.py",
    "measured_step.py",
    "all_reduce.py",
    "two_hosts.py",
    "slow_network.py",
    "seldom.py",
    "parameter_server_step.py",
    "first_index.py",
    "shared_dataset.py",
    "save_blocking.py",
    "pipeline_step.py",
    "shard_step.py",
    "shard_memory.py",
    "place_memory.py",
    "import_time.py",
)


def main() -> int:
    print(machine(), flush=True)
    rows: list[Row] = []
    words = sys.argv[1:]
    for name in BENCHMARKS:
        if words and not any(word in name for word in words):
            continue
        print(f"... {name}", file=sys.stderr, flush=True)
        script = Path(__file__).with_name(name)
        done = subprocess.run([sys.executable, str(script), "--json"], check=False, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            print(f"{name} failed with exit code {done.returncode}", file=sys.stderr)
            return done.returncode
        own = [Row(**fields) for fields in json.loads(done.stdout.strip().splitlines()[-1])]
        print(table(own), file=sys.stderr, flush=True)
        rows += own
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
