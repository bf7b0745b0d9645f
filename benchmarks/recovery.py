# SPDX-License-Identifier: Apache-2.0
"""How jobs recover: kills counted one by one, and the time from a failure to the next completed step.

    python benchmarks/recovery.py tally [KILLS [KILLS_OF_TORCHRUN]]    one of two ranks, kill -9, at any moment
    python benchmarks/recovery.py                                      times, with what the launchers do by default

The parts with two machines use network namespaces: they need root and iproute2. Torchrun runs with and without the
sharing of its store between attempts, which it has by default.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from measure import Row, machine, median_ratio, seconds, show

WORKER = str(Path(__file__).with_name("recovery_worker.py"))
LIMIT_SECONDS = 40.0
"""After how long without a step a job hangs."""
UNSHARED = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
MANY_RESTARTS = "1000"
TIMED_KILLS = 7
ATTEMPTS_OF_TORCHRUN = 12
SIDES = ("rankwise", "torchrun", "torchrun, store not shared")

Start = Callable[[list[str], dict[str, str]], "subprocess.Popen[str]"]


@dataclass
class Job:
    """A job of one launcher or two."""

    folder: Path
    launchers: list[subprocess.Popen[str]] = field(default_factory=list)

    def steps(self) -> list[tuple[int, int, float]]:
        """Return attempt, number of ranks and time of every step so far."""
        path = self.folder / "steps"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(a), int(n), float(t)) for a, n, t in (line.split() for line in lines if line.count(" ") == 2)]

    def attempt(self) -> int:
        """Return the latest attempt of which a rank has begun."""
        return max((int(path.name.split("-")[0]) for path in self.folder.glob("*.pid")), default=-1)

    def pid(self, attempt: int, rank: int) -> int:
        return int((self.folder / f"{attempt}-{rank}.pid").read_text())

    def has_ended(self) -> bool:
        return any(launcher.poll() is not None for launcher in self.launchers)

    def wait_for(self, is_so: Callable[[], bool], limit: float = LIMIT_SECONDS) -> bool:
        """Return whether something became so in time."""
        deadline = time.time() + limit
        while time.time() < deadline:
            if is_so():
                return True
            time.sleep(0.005)
        return False

    def wait_for_step(self, after: float, attempt: int, limit: float = LIMIT_SECONDS) -> float | None:
        """Return when a step of a later attempt was completed, or ``None`` where none was."""

        def found() -> bool:
            return self.has_ended() or any(a > attempt and t > after for a, _, t in self.steps()[-50:])

        self.wait_for(found, limit)
        return next((t for a, _, t in self.steps() if a > attempt and t > after), None)


def words_of(side: str, num_ranks: int, *options: str) -> tuple[list[str], dict[str, str], str]:
    """Return the launcher's words, its variables and the worker's mode."""
    if side == "rankwise":
        return [sys.executable, "-m", "rankwise", "run", "-n", str(num_ranks), *options], {}, "rankwise"
    words = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={num_ranks}", *options]
    return words, UNSHARED if "not shared" in side else {}, "torch"


def start_here(words: list[str], variables: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        words,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
    )


@contextmanager
def one_machine(side: str, num_ranks: int) -> Iterator[Job]:
    """Run a job on this machine for as long as the block lasts."""
    options = ["--max-restarts", MANY_RESTARTS]
    if side != "rankwise":
        options = ["--standalone", f"--max-restarts={MANY_RESTARTS}"]
    words, variables, mode = words_of(side, num_ranks, *options)
    with tempfile.TemporaryDirectory() as name:
        job = Job(Path(name))
        job.launchers.append(start_here([*words, WORKER, mode, name], variables))
        try:
            yield job
        finally:
            end(job)


def end(job: Job) -> None:
    """Have the ranks finish; kill what does not."""
    (job.folder / "stop").touch()
    for launcher in job.launchers:
        with contextlib.suppress(subprocess.TimeoutExpired):
            launcher.wait(5)
            continue
        launcher.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            launcher.wait(40)
        launcher.kill()
        launcher.wait()


# -- kills, counted ----------------------------------------------------------------------------------------


def tally(side: str, num_kills: int, seed: int) -> Counter[str]:
    """Kill one of two ranks again and again; return how often the job recovered cleanly, or how not."""
    chance = random.Random(seed)
    counted: Counter[str] = Counter()
    while sum(counted.values()) < num_kills:
        with one_machine(side, 2) as job:
            attempt = 0
            job.wait_for(lambda job=job: len(job.steps()) > 2)
            while sum(counted.values()) < num_kills:
                how = kill_once(job, attempt, chance)
                counted[how] += 1
                if how in {"hung", "job failed"}:
                    break
                attempt = job.attempt()
        print(f"{side}: {dict(counted)}", file=sys.stderr, flush=True)
    return counted


def kill_once(job: Job, attempt: int, chance: random.Random) -> str:
    """Kill a rank at a moment drawn by chance, from the first lines of its script on; return what came of it."""
    victim = chance.randrange(2)
    job.wait_for((job.folder / f"{attempt}-{victim}.pid").exists)
    if chance.random() < 0.7:
        before = len(job.steps())
        job.wait_for(lambda: len(job.steps()) > before)
    time.sleep(chance.uniform(0.0, 0.3))
    killed = time.time()
    try:
        os.kill(job.pid(attempt, victim), signal.SIGKILL)
    except ProcessLookupError:
        return "gone before"
    if job.wait_for_step(killed, attempt) is None:
        return "job failed" if job.has_ended() else "hung"
    return "clean" if job.attempt() == attempt + 1 else "more than one restart"


# -- times -------------------------------------------------------------------------------------------------


def kill_to_step(side: str) -> list[float]:
    """Return the seconds from each kill of one of 4 ranks to the next completed step."""
    figures: list[float] = []
    with one_machine(side, 4) as job:
        for turn in range(TIMED_KILLS):
            attempt = turn
            job.wait_for(lambda attempt=attempt: sum(a == attempt for a, _, _ in job.steps()) > 3)
            killed = time.time()
            os.kill(job.pid(attempt, 1 + turn % 3), signal.SIGKILL)
            step = job.wait_for_step(killed, attempt)
            if step is None or job.attempt() != attempt + 1:
                raise RuntimeError(f"{side} did not recover from kill {turn + 1}")
            figures.append(step - killed)
    return figures


def stop_to_step() -> float:
    """Return the seconds from SIGSTOP of one of 4 ranks to the next completed step."""
    with one_machine("rankwise", 4) as job:
        job.wait_for(lambda: len(job.steps()) > 3)
        stopped = time.time()
        os.kill(job.pid(0, 2), signal.SIGSTOP)
        step = job.wait_for_step(stopped, 0)
        return float("inf") if step is None else step - stopped


@contextmanager
def two_machines(side: str, *options: str) -> Iterator[tuple[Job, object]]:
    """Run a job on two hosts of two ranks each."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "multihost"))
    from hosts import Hosts  # noqa: PLC0415 - found just now

    with ExitStack() as opened:
        hosts = opened.enter_context(Hosts(2))
        folder = opened.enter_context(tempfile.TemporaryDirectory())
        words, variables, mode = words_of(side, 2, *[word.format(host=hosts.addresses[0]) for word in options])
        if side == "rankwise":
            variables = {"RANKWISE_SECRET": "of this benchmark"}
        job = Job(Path(folder))
        for host in range(2):
            own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0", **variables}
            job.launchers.append(
                hosts.start(
                    host, [*words, WORKER, mode, folder], own, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                )
            )
        job.wait_for(lambda: len(job.steps()) > 5)
        try:
            yield job, hosts
        finally:
            end(job)


RANKWISE_OPTIONS = ("--rendezvous", "{host}:29400")
TORCHRUN_OPTIONS = ("--rdzv-backend=c10d", "--rdzv-endpoint={host}:29400", "--max-restarts=3")


def cut_to_end() -> float:
    """Return the seconds from the cut of a node's link until every launcher has ended or its ranks continue."""
    with two_machines("rankwise", "--nodes", "2", *RANKWISE_OPTIONS) as (job, hosts):
        cut = time.time()
        hosts.link(1, up=False)  # type: ignore[attr-defined]
        over = job.wait_for(lambda: all(one.poll() is not None for one in job.launchers), 100)
        return time.time() - cut if over else float("inf")


def cut_to_step() -> float:
    """Return the seconds from the cut of a node's link until the other continues alone."""
    with two_machines("rankwise", "--nodes", "1:2", *RANKWISE_OPTIONS) as (job, hosts):
        cut = time.time()
        hosts.link(1, up=False)  # type: ignore[attr-defined]
        step = job.wait_for_step(cut, 0, 100)
        hosts.link(1, up=True)  # type: ignore[attr-defined]
        return float("inf") if step is None else step - cut


def short_cut_to_step(cut_seconds: float) -> tuple[float, bool]:
    """Return the seconds from a short cut's healing to the next step, and whether it is of the same attempt."""
    with two_machines("rankwise", "--nodes", "2", *RANKWISE_OPTIONS) as (job, hosts):
        hosts.link(1, up=False)  # type: ignore[attr-defined]
        time.sleep(cut_seconds)
        hosts.link(1, up=True)  # type: ignore[attr-defined]
        healed = time.time()
        job.wait_for(lambda: any(t > healed for _, _, t in job.steps()[-3:]))
        after = [(a, t) for a, _, t in job.steps() if t > healed]
        return (after[0][1] - healed, after[0][0] == 0) if after else (float("inf"), False)


def node_lost_to_step(side: str) -> float:
    """Return the seconds from the kill -9 of a node, launcher and ranks, until the other continues alone."""
    options = ("--nodes", "1:2", *RANKWISE_OPTIONS) if side == "rankwise" else ("--nnodes=1:2", *TORCHRUN_OPTIONS)
    with two_machines(side, *options) as (job, _):
        ranks = [job.pid(0, rank) for rank in (2, 3)]
        lost = time.time()
        job.launchers[1].kill()
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        job.launchers.pop(1).wait()
        job.wait_for(lambda: any(n == 2 and t > lost for _, n, t in job.steps()[-3:]), 100)
        return next((t - lost for _, n, t in job.steps() if n == 2 and t > lost), float("inf"))


def within(taken: float, waited: int = 100) -> str:
    """Return a time, or that it never came."""
    return seconds(taken) if taken < waited else f"none in {waited} s"


def against_limit(what: str, taken: float, limit_seconds: int) -> Row:
    """Return the row of a time that has a limit and no peer in the same run."""
    return Row(what, within(taken), f"limit {limit_seconds} s", taken / limit_seconds, 1)


def main() -> None:
    if "tally" in sys.argv:
        numbers = [int(word) for word in sys.argv[2:] if word.isdecimal()]
        kills, kills_of_torchrun = (*numbers, 100, ATTEMPTS_OF_TORCHRUN)[:2] if len(numbers) != 1 else (numbers[0], 12)
        print(machine())
        for side in SIDES:
            print(
                f"{side}: {dict(tally(side, kills if side == 'rankwise' else kills_of_torchrun, seed=1))}", flush=True
            )
        return
    unshared = SIDES[2]
    ours, theirs = kill_to_step("rankwise"), kill_to_step(unshared)
    ours_lost, theirs_lost = node_lost_to_step("rankwise"), node_lost_to_step("torchrun")
    stopped, cut, alone = stop_to_step(), cut_to_end(), cut_to_step()
    healed, same = short_cut_to_step(4.0)
    rows = [
        Row(
            f"kill -9 of one of 4 ranks to the next step, against torchrun ({TIMED_KILLS} kills)",
            seconds(statistics.median(ours)),
            seconds(statistics.median(theirs)),
            median_ratio(ours, theirs),
            0.4,
        ),
        against_limit(
            f"kill -9 of a node to the next step of the other (torchrun: {within(theirs_lost)})", ours_lost, 20
        ),
        against_limit("SIGSTOP of a rank to the next step", stopped, 15),
        against_limit("link cut until all launchers and ranks have ended", cut, 60),
        against_limit("link cut until the other node continues alone", alone, 20),
        against_limit(f"link cut for 4 s: healing to next step, {'same' if same else 'ANOTHER'} attempt", healed, 10),
    ]
    show(rows)


if __name__ == "__main__":
    main()
