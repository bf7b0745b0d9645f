# SPDX-License-Identifier: Apache-2.0
"""Runs jobs in which one rank, or the network, is slow for a known reason: does the report's first sentence name both?

Run by ``make slowdowns`` as root, who may make hosts, on a machine where nothing else runs: there, a rank that loses
its processor to another test would rightly be reported. Arguments: words of which a case must have one, all by default.
Exit status: 0 where at least ``NAMED`` of them were named. Not part of CI, whose tests take the kinds that a loaded
machine does not change.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
NAMED = 0.95
SAYS = {
    "data": "waits for its data",
    "compute": "computes longer for as many samples",
    "script": "spends longer in the script",
    "shared": "whose processor other processes use too",
    "paused": "is repeatedly paused",
    "disk": "writes its checkpoints more slowly",
    "uneven": "has more samples than the others",
    "swap": "reads memory back from a disk",
}
MBIT = 50.0
"""What a host with a slow link may send."""
DELAY_SECONDS = 0.01
LOST_ONE_IN = 30


@dataclass(frozen=True, slots=True)
class Case:
    """A job, and what its report must name."""

    kind: str
    """One of ``SAYS``; or how the network of host ``slow`` is slow: ``rate``, ``delay``, ``loss``."""
    slow: int
    """The rank, or the host."""
    ranks_per_host: tuple[int, ...]

    def __str__(self) -> str:
        hosts = "" if len(self.ranks_per_host) == 1 else f" on {len(self.ranks_per_host)} hosts"
        what = "rank" if self.kind in SAYS else "network of host"
        return f"{self.kind}, {what} {self.slow} of {sum(self.ranks_per_host)} ranks{hosts}"

    def is_named_in(self, sentence: str) -> bool:
        """Return whether a sentence names what is slow, and why."""
        if self.kind in SAYS:
            return f"all wait for rank {self.slow}," in sentence and SAYS[self.kind] in sentence
        if self.kind == "delay":
            return "the network between host0 and host1" in sentence
        return f"the network from host{self.slow}" in sentence


CASES = [
    Case("data", 0, (2,)),
    Case("compute", 0, (2,)),
    Case("compute", 1, (2,)),
    Case("script", 0, (2,)),
    Case("shared", 0, (2,)),
    Case("shared", 1, (2,)),
    Case("paused", 0, (2,)),
    Case("disk", 1, (2,)),
    Case("uneven", 1, (2,)),
    Case("swap", 0, (2,)),
    Case("swap", 1, (2,)),
    Case("data", 1, (3,)),
    Case("disk", 1, (3,)),
    Case("script", 2, (4,)),
    Case("uneven", 0, (3,)),
    Case("data", 1, (1, 1)),
    Case("compute", 3, (2, 2)),
    Case("uneven", 1, (1, 1)),
    Case("paused", 1, (1, 1)),
    Case("rate", 1, (1, 1)),
    Case("rate", 0, (2, 2)),
    Case("rate", 1, (1, 1, 1)),
    Case("delay", 1, (1, 1)),
    Case("loss", 1, (1, 1)),
]


def first_sentence(case: Case) -> str:
    """Return what the report of such a job begins with."""
    rankwise = [sys.executable, "-m", "rankwise"]
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        if len(case.ranks_per_host) > 1:
            run_on_hosts(case)
        else:
            words = ["run", "-n", str(case.ranks_per_host[0]), "--report", "records"]
            job = [*rankwise, *words, str(HERE / "train.py"), case.kind, str(case.slow)]
            subprocess.run(job, check=True, timeout=120, capture_output=True)
        told = subprocess.run([*rankwise, "report", "records"], check=True, timeout=60, capture_output=True, text=True)
        return told.stdout.splitlines()[0]


def run_on_hosts(case: Case) -> None:
    """Run a job on hosts that are network namespaces; raise if a rank fails."""
    sys.path.insert(0, str(HERE.parent / "multihost"))
    from hosts import Hosts

    delay_seconds = {"delay": DELAY_SECONDS, "loss": DELAY_SECONDS / 20}.get(case.kind, 0.0)
    with Hosts(len(case.ranks_per_host), delay_seconds=delay_seconds) as hosts:
        if case.kind == "rate":
            hosts.limit(case.slow, MBIT)
        if case.kind == "loss":
            hosts.lose(case.slow, LOST_ONE_IN)
        ended = hosts.run_ranks(
            HERE / "train.py",
            case.ranks_per_host,
            case.kind,
            str(case.slow if case.kind in SAYS else -1),
            env={"RANKWISE_REPORT": str(Path("records").absolute()), "PYTHONPATH": os.pathsep.join(sys.path)},
            timeout_seconds=120,
        )
        for one in ended:
            if one.exit_code != 0:
                raise RuntimeError(one.stderr)


def main() -> int:
    """Run all cases, or those that the arguments name."""
    cases = [case for case in CASES if not sys.argv[1:] or any(word in str(case) for word in sys.argv[1:])]
    num_named = 0
    for case in cases:
        sentence = first_sentence(case)
        is_named = case.is_named_in(sentence)
        num_named += is_named
        print(f"{'named ' if is_named else 'MISSED'}  {case}: {sentence}", flush=True)
    print(f"{num_named} of {len(cases)} named")
    return 0 if num_named >= NAMED * len(cases) else 1


if __name__ == "__main__":
    sys.exit(main())
