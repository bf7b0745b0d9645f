# SPDX-License-Identifier: Apache-2.0
"""The control plane as ranks grow: time, memory, messages and bytes, with the real server: ``make scale``.

The launcher's server (store, coordinator, event log) runs in a process of its own, hosts and ranks in others
(``scale_parts.py``). One job each of 10, 100, 1,000 and 10,000 ranks, eight on a host: its hosts introduce themselves,
its ranks join, confirm a step, answer a status poll, are told of a failure, restart, lose one host in ten at once,
restart with these hosts, and end. Torch's TCPStore with
libuv does the same join in the same run. Planning a save and a load is measured with the state of as many ranks.

Arguments: numbers of ranks; by default these four.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

from measure import machine, seconds
from scale_parts import RANKS_PER_HOST
from scale_plans import plan

RANKS = (10, 100, 1_000, 10_000)
NUM_PROCESSES = 4
REACH = {"join": 10.0, "failure": 5.0, "save": 2.0, "load": 2.0}


# Every 25th connection, torch's client looks up its peer's name for its log: 5 seconds where no DNS server answers.
FILES_ONLY = "f=$(mktemp); echo 'hosts: files' > $f; mount --bind $f /etc/nsswitch.conf; rm $f; exec \"$@\""
WITHOUT_DNS = ["unshare", "--mount", "sh", "-c", FILES_ONLY, "sh"] if os.geteuid() == 0 else []


class Part:
    """A process of the simulation."""

    def __init__(self, *arguments: object) -> None:
        words = [*WITHOUT_DNS, sys.executable, str(Path(__file__).with_name("scale_parts.py")), *map(str, arguments)]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._in, self._out = _piped(self._process.stdin), _piped(self._process.stdout)
        self.first: dict[str, Any] = self.answer()

    def ask(self, *words: object) -> None:
        """Have it do something."""
        self._in.write(json.dumps(words) + "\n")
        self._in.flush()

    def answer(self) -> dict[str, Any]:
        """Return its next answer."""
        line = self._out.readline()
        if not line:
            raise RuntimeError("a part of the simulation has ended")
        return json.loads(line)

    def end(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        self._in.close()
        self._out.close()


def _piped(stream: IO[str] | None) -> IO[str]:
    if stream is None:
        raise RuntimeError("no pipe")
    return stream


@dataclass
class Figures:
    """What one number of ranks took, by phase."""

    ranks: int
    seconds: dict[str, float] = field(default_factory=dict)
    cpu: dict[str, float] = field(default_factory=dict)
    """Of the server."""
    messages: dict[str, float] = field(default_factory=dict)
    """Per rank."""
    bytes: dict[str, float] = field(default_factory=dict)
    """Per rank."""
    megabytes: float = 0.0
    """Of the server, at most."""
    torch: dict[str, float] = field(default_factory=dict)


class Job:
    """One job: its server, and its hosts divided among processes."""

    def __init__(self, ranks: int) -> None:
        self.figures = Figures(ranks)
        num_hosts = -(-ranks // RANKS_PER_HOST)
        self.server = Part("server", num_hosts)
        count = min(NUM_PROCESSES, num_hosts)
        bounds = [num_hosts * n // count for n in range(count + 1)]
        port = self.server.first["port"]
        self.parts = [Part("hosts", port, first, end, ranks) for first, end in pairwise(bounds)]
        self._cpu = self.server.first["cpu"]

    def phase(self, name: str, *steps: tuple[object, ...], of_first: tuple[object, ...] = ()) -> None:
        """Have every process do some steps, the first one ``of_first`` before; record how long until all are done."""
        begun = time.monotonic()
        asked = [(part, step) for step in steps for part in self.parts]
        if of_first:
            asked.insert(0, (self.parts[0], of_first))
        for part, step in asked:
            part.ask(*step)
        answers = [part.answer() for part, _ in asked]
        errors = [error for answer in answers for error in answer["errors"]]
        if errors:
            raise RuntimeError(f"{name} of {self.figures.ranks} ranks: {errors[:3]}")
        self.server.ask("usage")
        used = self.server.answer()
        figures = self.figures
        figures.seconds[name] = max(answer["at"] for answer in answers) - begun
        figures.messages[name] = sum(answer["messages"] for answer in answers) / figures.ranks
        figures.bytes[name] = sum(answer["bytes"] for answer in answers) / figures.ranks
        figures.cpu[name], self._cpu = used["cpu"] - self._cpu, used["cpu"]
        figures.megabytes = used["megabytes"]
        print(
            f"    {figures.ranks:6d} {name:8s} {seconds(figures.seconds[name]):>8s}  "
            f"server {figures.cpu[name]:6.2f} s  "
            f"{figures.messages[name]:8.1f} messages  {figures.bytes[name]:10.0f} bytes per rank  "
            f"{figures.megabytes:5.0f} MB",
            file=sys.stderr,
            flush=True,
        )

    def torch_join(self) -> None:
        """Have torch's store do the same join."""
        peer = Part("torch")
        begun = time.monotonic()
        for part in self.parts:
            part.ask("torch_join", peer.first["port"])
        last = max(part.answer()["at"] for part in self.parts)
        peer.ask("usage")
        used = peer.answer()
        peer.end()
        self.figures.torch = {
            "seconds": last - begun,
            "cpu": used["cpu"] - peer.first["cpu"],
            "megabytes": used["megabytes"],
        }
        print(f"    {self.figures.ranks:6d} TCPStore {seconds(last - begun):>8s}  {used}", file=sys.stderr, flush=True)

    def end(self) -> None:
        """End all processes."""
        for part in [*self.parts, self.server]:
            part.end()


def simulated(ranks: int) -> Figures:
    """Run one job of so many ranks."""
    job = Job(ranks)
    try:
        job.phase("hosts", ("open_links",), ("wait_for", "StartAttempt", {"attempt": 0}))
        job.phase("join", ("join", 0))
        job.phase("confirm", ("barrier", "save-1"))
        job.phase("poll", of_first=("poll_status",))
        job.phase("failure", ("know_failure", 3), of_first=("fail", 3, 0))
        job.phase("leave", ("leave",))
        job.phase(
            "restart",
            ("wait_for", "StopAttempt", {"attempt": 0}),
            ("ends", 0, {"departed": False}),
            ("wait_for", "StartAttempt", {"attempt": 1}),
            ("join", 1),
        )
        job.phase("lost", ("lose",), ("know_losses",))
        job.phase(
            "rejoin",
            ("leave",),
            ("wait_for", "StopAttempt", {"attempt": 1}),
            ("ends", 1, {"departed": False}),
            ("open_links",),
            ("wait_for", "StartAttempt", {"attempt": 2}),
            ("join", 2),
        )
        job.phase("end", ("leave",), ("ends", 2, {"departed": True}), ("wait_for", "EndJob", {}))
        job.torch_join()
    finally:
        job.end()
    return job.figures


PHASES = {
    "hosts": "all hosts introduced, and told to start",
    "join": "all ranks joined",
    "confirm": "all confirmed a step (a barrier through the store)",
    "poll": "all answered a status poll",
    "failure": "all know a failure",
    "leave": "all left",
    "restart": "all stopped, restarted and joined",
    "lost": "all know that one host in ten is lost",
    "rejoin": "all left, restarted with these hosts and joined",
    "end": "orderly end",
}


def table(jobs: list[Figures], plans: list[dict[str, float]]) -> str:
    """Return the figures as a table in Markdown: what grows with the ranks, and what must not."""
    heads = " | ".join(f"{job.ranks:,} ranks" for job in jobs)
    lines = [f"| what | {heads} | reach |", "|---|" + "---|" * (len(jobs) + 1)]

    def add(what: str, cells: list[str], reach: str = "") -> None:
        lines.append(f"| {what} | {' | '.join(cells)} | {reach} |")

    for name, words in PHASES.items():
        reach = f"<= {REACH[name]:g} s" if name in REACH else ""
        add(words, [seconds(job.seconds[name]) for job in jobs], reach)
    add("the same join with torch's TCPStore", [seconds(job.torch["seconds"]) for job in jobs])
    for name in ("save", "load"):
        add(f"planning a {name} on rank zero", [seconds(plan[name]) for plan in plans], f"<= {REACH[name]:g} s")
    for name in ("join", "confirm", "failure", "leave", "lost", "end"):
        add(f"{name}: messages per rank", [f"{job.messages[name]:.1f}" for job in jobs], "constant")
        add(f"{name}: bytes per rank", [f"{job.bytes[name]:,.0f}" for job in jobs], "constant")
    add("join: CPU time of the server", [seconds(job.cpu["join"]) for job in jobs])
    add("join: CPU time of torch's", [seconds(job.torch["cpu"]) for job in jobs])
    add("memory of the server", [f"{job.megabytes:.0f} MB" for job in jobs], "< 1,000 MB")
    add("memory of torch's", [f"{job.torch['megabytes']:.0f} MB" for job in jobs])
    add("manifest", [f"{plan['manifest megabytes']:.1f} MB" for plan in plans])
    return "\n".join(lines)


def main() -> int:
    print(machine(), flush=True)
    numbers = [int(word) for word in sys.argv[1:]] or list(RANKS)
    jobs = [simulated(number) for number in numbers]
    plan(1)  # imports
    print(table(jobs, [plan(number) for number in numbers]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
