# SPDX-License-Identifier: Apache-2.0
"""Runs jobs in which one rank is slow for a known reason, and says whether the report's first sentence names both.

Run by ``make slowdowns``, on a machine where nothing else runs: there, a rank that loses its processor to another test
would rightly be reported. Exit status: 0 where at least ``NAMED`` of them were named. Not part of CI, whose tests take
the kinds that a loaded machine does not change.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
NAMED = 0.95
SAYS = {
    "data": "waits for its data",
    "compute": "computes longer for as many samples",
    "script": "spends longer in the script",
    "shared": "whose processor other processes use too",
    "paused": "is stopped again and again",
    "disk": "writes its checkpoints more slowly",
    "uneven": "has more samples than the others",
    "swap": "reads memory back from a disk",
}
CASES = [
    *((kind, slow, 2) for kind in SAYS for slow in (0, 1)),
    ("data", 1, 3),
    ("disk", 1, 3),
    ("script", 2, 4),
    ("uneven", 0, 3),
]
"""The kind, the slow rank, the number of ranks."""


def first_sentence(kind: str, slow: int, num_ranks: int) -> str:
    """Return what the report of such a job begins with."""
    rankwise = [sys.executable, "-m", "rankwise"]
    with tempfile.TemporaryDirectory() as folder:
        job = [*rankwise, "run", "-n", str(num_ranks), "--report", "records", str(HERE / "train.py"), kind, str(slow)]
        subprocess.run(job, cwd=folder, check=True, timeout=120, capture_output=True)
        told = subprocess.run(
            [*rankwise, "report", "records"], cwd=folder, check=True, timeout=60, capture_output=True, text=True
        )
        return told.stdout.splitlines()[0]


def main() -> int:
    """Run all cases."""
    num_named = 0
    for kind, slow, num_ranks in CASES:
        sentence = first_sentence(kind, slow, num_ranks)
        is_named = f"all wait for rank {slow}," in sentence and SAYS[kind] in sentence
        num_named += is_named
        print(f"{'named ' if is_named else 'MISSED'}  {kind}, rank {slow} of {num_ranks}: {sentence}", flush=True)
    print(f"{num_named} of {len(CASES)} named")
    return 0 if num_named >= NAMED * len(CASES) else 1


if __name__ == "__main__":
    sys.exit(main())
