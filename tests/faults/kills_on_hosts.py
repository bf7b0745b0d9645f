# SPDX-License-Identifier: Apache-2.0
"""Kill a training on several hosts at random moments until it ends; nothing may be lost, hang or differ.

``python tests/faults/kills_on_hosts.py [--hosts 2] [--kills 30] [--seed 0]``. Each host is a network namespace with a
hostname and an address of its own, a launcher, and one rank; all share a folder. A kill ends a rank, a launcher, or
every process of a host, some hosts with their cable out, so that no connection is closed. The job is ``by hand``: it
ends, and its commands are typed again; or ``restarts``, with ``--max-restarts``, and ``elastic``, with ``--nodes 1:N``:
launchers that were killed are started again while the others continue.

Each attempt must restore all that an earlier one has saved; at the end the parameters must equal those of a training
that nobody disturbed, in all bits, or in 9 digits if a part of it ran on fewer ranks.
"""

from __future__ import annotations

import argparse
import os
import random
import select
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from kills import LIMIT_SECONDS, STRATEGIES, TRAIN

import rankwise as rw

sys.path.insert(0, str(Path(__file__).parent.parent / "multihost"))
from hosts import Hosts

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.warm import Started

RESTARTED = {"by hand": [], "restarts": ["--max-restarts", "1000"], "elastic": ["--max-restarts", "1000"]}
VICTIMS = ["rank", "launcher", "host", "host without its cable"]
START = "---- started"
MOMENTS = {"start": 0.25, "restore": 0.15, "training": 0.6}


class Job:
    """One launcher per host, each with one rank, in one folder."""

    def __init__(self, hosts: Hosts, folder: Path, restarted: str, words: list[str]) -> None:
        self.hosts = hosts
        self.folder = folder
        nodes = f"1:{hosts.number}" if restarted == "elastic" else str(hosts.number)
        meeting = ["--nodes", nodes, "--rendezvous", f"{hosts.addresses[0]}:29400", *RESTARTED[restarted]]
        self._command = [sys.executable, "-m", "rankwise", "run", "-n", "1", *meeting, "train.py", *words]
        self.launchers: list[Started | None] = [None] * hosts.number
        (folder / "train.py").write_text(TRAIN, encoding="utf-8")

    def start(self, host: int) -> None:
        """Start the launcher of a host, which reads the secret of this user as all others do."""
        with (self.folder / f"output-{host}.txt").open("a", encoding="utf-8") as output:
            print(START, file=output, flush=True)
            there = ["env", f"--chdir={self.folder}", *self._command]
            self.launchers[host] = self.hosts.start(host, there, {"OMP_NUM_THREADS": "1"}, stdout=output, stderr=output)

    def codes(self) -> list[int | None]:
        """Return the exit code of each launcher; ``None`` where it runs or was not started."""
        return [None if one is None else one.poll() for one in self.launchers]

    def wait_until(self, is_so: Callable[[], bool], seconds: float) -> bool:
        """Return whether ``is_so()``, or every launcher ended, within a time."""
        deadline = time.monotonic() + seconds
        while not is_so() and None in self.codes():
            if time.monotonic() > deadline:
                return False
            select.select([], [], [], 0.01)
        return True

    def have_met(self) -> bool:
        """Return whether every launcher has joined since the first one was started."""
        said = _text(self.folder / "output-0.txt").rpartition(START)[2]
        return f"({self.hosts.number} of {self.hosts.number} nodes)" in said

    def kill(self, host: int, victim: str) -> str:
        """Kill something on a host; return what, and what its rank did."""
        phase = _text(self.folder / f"phase-{host}") or "start"
        pid = int(_text(self.folder / f"pid-{host}") or 0)
        launcher = self.launchers[host]
        if victim == "rank" and not pid:
            victim = "launcher"
        if victim == "rank":
            _kill(pid)
        elif victim == "launcher" and launcher is not None:
            launcher.kill()
        else:
            self.hosts.link(host, up=victim == "host")
            self.hosts.kill_all(host)
        return f"{victim} {host} in {phase}"

    def said(self) -> str:
        """Return the end of what launchers and ranks wrote."""
        return "\n".join(f"{one.name}:\n{one.read_text()[-6000:]}" for one in sorted(self.folder.glob("output-*")))


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _forget_ranks(folder: Path) -> None:
    for left in [*folder.glob("pid-*"), *folder.glob("phase-*")]:
        left.unlink()


class Disturbed:
    """One training that is killed until it ends."""

    def __init__(self, job: Job, restarted: str, draw: random.Random, seconds: tuple[float, float]) -> None:
        self._job = job
        self._restarted = restarted
        self._draw = draw
        self._start_seconds, self._train_seconds = seconds
        self.kills: list[str] = []
        self.by_hand = 0
        """How often all commands were typed again, although launchers could restart."""

    def train(self, most_kills: int) -> str:
        """Kill up to so many times; return what was wrong, if anything."""
        job = self._job
        _forget_ranks(job.folder)
        self._start_all()
        while True:
            if len(self.kills) >= most_kills:
                job.wait_until(lambda: False, LIMIT_SECONDS)
            else:
                self._wait_for_a_moment()
            codes = job.codes()
            if None not in codes:
                if not any(codes):
                    return self._lost()
                if self._restarted == "by hand" or not self.kills:
                    return f"ended with {codes}"
                self.kills[-1] += f": it ended with {codes}, and was started by hand"
                self.by_hand += 1
                if self.by_hand > len(self.kills):
                    return f"ended with {codes}, again and again"
                self._start_all()
                continue
            if len(self.kills) >= most_kills:
                return f"hangs, its launchers have {codes}"
            told = self._kill()
            if told:
                return told

    def _start_all(self) -> None:
        order = list(range(self._job.hosts.number))
        self._draw.shuffle(order)
        for host in order:
            self._job.start(host)

    def _wait_for_a_moment(self) -> None:
        job, draw = self._job, self._draw
        moment = draw.choices(list(MOMENTS), list(MOMENTS.values()))[0]
        if moment == "start":
            job.wait_until(lambda: False, draw.uniform(0.0, self._start_seconds))
            return
        if not job.wait_until((job.folder / "pid-0").exists, LIMIT_SECONDS):
            return
        job.wait_until(lambda: False, draw.uniform(0.0, 0.05 if moment == "restore" else 0.5 * self._train_seconds))

    def _kill(self) -> str:
        """Kill, and see that the job ends or continues; return what was wrong."""
        job, draw = self._job, self._draw
        number = 1 if draw.random() < 0.8 else min(2, job.hosts.number)
        hosts = draw.sample(range(job.hosts.number), number)
        told = " and ".join(job.kill(host, draw.choice(VICTIMS)) for host in hosts)
        self.kills.append(told)
        _forget_ranks(job.folder)
        if self._restarted == "by hand":
            if not job.have_met():
                # Launchers wait for those that have not joined, and for the first one, for minutes.
                self._start_again(hosts)
                return ""
            has_ended = job.wait_until(lambda: False, LIMIT_SECONDS)
            for host in hosts:
                job.hosts.link(host, up=True)
            if not has_ended:
                return f"hangs after a kill of {told}: launchers have {job.codes()}"
            if any(job.codes()):
                self._start_all()
            return ""
        # Some launchers are killed; the others wait for them for 30 s.
        job.wait_until(lambda: False, draw.uniform(0.0, 12.0))
        self._start_again(hosts)
        return ""

    def _start_again(self, hosts: list[int]) -> None:
        """Start the launchers of hosts that were killed, unless the job had ended when they were hit."""
        job = self._job
        for host in hosts:
            job.hosts.link(host, up=True)
        others = [code for host, code in enumerate(job.codes()) if host not in hosts]
        if others and all(code == 0 for code in others):
            job.launchers = [one for host, one in enumerate(job.launchers) if host not in hosts]
            return
        for host in hosts:
            if job.codes()[host] is not None:
                job.start(host)

    def _lost(self) -> str:
        return _text(self._job.folder / "lost")


def _train_to_the_end(hosts: Hosts, folder: Path, words: list[str]) -> tuple[float, float]:
    """Train undisturbed; return the seconds of the start, and from the restore to the end."""
    job = Job(hosts, folder, "by hand", words)
    began = time.monotonic()
    for host in range(hosts.number):
        job.start(host)
    job.wait_until((folder / "pid-0").exists, LIMIT_SECONDS)
    started = time.monotonic()
    if not job.wait_until(lambda: False, LIMIT_SECONDS) or any(job.codes()):
        raise RuntimeError(job.said())
    return started - began, time.monotonic() - started


def _difference(whole: Path, folder: Path, *, is_elastic: bool) -> str:
    """Return how the parameters at the end differ from the undisturbed ones."""
    files = sorted(path.name for path in (whole / "end").glob("*.safetensors"))
    if not files:
        return "the undisturbed training has no end"
    if not is_elastic:
        unlike = [name for name in files if (whole / "end" / name).read_bytes() != (folder / "end" / name).read_bytes()]
        return f"other bits in {unlike}" if unlike else ""
    ends = [rw.load(one / "end")["model"] for one in (whole, folder)]
    most = max(float((ends[0][name] - ends[1][name]).abs().max()) for name in ends[0])
    return f"parameters differ by {most:.1e}" if most > 1e-9 else ""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    draw, failed, counted = random.Random(options.seed), 0, Counter[str]()
    torch.set_num_threads(1)
    with rw.join(device="cpu"), Hosts(options.hosts) as hosts:
        while counted.total() < options.kills:
            restarted = draw.choice(list(RESTARTED))
            strategy = draw.choice(STRATEGIES[:2] if restarted == "elastic" else STRATEGIES)
            words = [draw.choice(["synchronous", "asynchronous"]), strategy, str(options.steps)]
            with tempfile.TemporaryDirectory() as undisturbed, tempfile.TemporaryDirectory() as disturbed:
                whole, folder = Path(undisturbed), Path(disturbed)
                seconds = _train_to_the_end(hosts, whole, words)
                job = Job(hosts, folder, restarted, words)
                training = Disturbed(job, restarted, draw, seconds)
                told = training.train(most_kills=8)
                told = told or _difference(whole, folder, is_elastic=restarted == "elastic")
                counted[strategy] += len(training.kills)
                failed += bool(told)
                ending = told or "as undisturbed"
                print(f"{'NOT' if told else 'ok':5}{restarted}, {' '.join(words)}: {ending}", flush=True)
                print("".join(f"     {kill}\n" for kill in training.kills), end="", flush=True)
                if told or training.by_hand:
                    print(job.said(), flush=True)
                for host in range(hosts.number):
                    hosts.kill_all(host)
    print(f"{options.hosts} hosts, {counted.total()} kills ({dict(counted)}), {failed} trainings with a failure")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
