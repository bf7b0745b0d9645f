# SPDX-License-Identifier: Apache-2.0
"""A link between hosts that is cut while ranks train with strategies that rarely wait or send little."""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import cut_off
import pytest
from cut_off import MAX_STALENESS, NUM_STEPS, OVERLAP, SERVED, SERVER, STEPS_BEFORE
from hosts import PORT, Hosts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from hosts import Ended

    from tests.warm import WarmPython

SCRIPT = Path(cut_off.__file__)
BEHIND = 2
"""The rank that is alone on its host. The server, and the worker rank 0, are together on the other."""
CUT_SECONDS = 2.0
EXACT = ("sync", "diloco", "powersgd")
"""Ways of which two runs come to the same bits."""
STAYING = ("sync-cut", "diloco-cut")
LIMIT_SECONDS = 5.0
TAKEN: dict[str, list[tuple[int, str]]] = {
    "sync": [],
    "async": [(0, "through")],
    "stale": [(0, str(STEPS_BEFORE + MAX_STALENESS))],
    "diloco": [(rank, str(STEPS_BEFORE + OVERLAP)) for rank in range(3)],
    "powersgd": [],
}
"""Which rank comes how far while the link is cut."""
NOT_TAKEN = {
    "sync": [(0, STEPS_BEFORE + 1), (BEHIND, STEPS_BEFORE + 1)],
    "async": [(BEHIND, STEPS_BEFORE + 2)],
    "stale": [(0, STEPS_BEFORE + MAX_STALENESS + 1), (BEHIND, STEPS_BEFORE + 1)],
    "diloco": [(rank, STEPS_BEFORE + OVERLAP + 1) for rank in range(3)],
    "powersgd": [(rank, STEPS_BEFORE + 1) for rank in range(3)],
}
"""Which step of a rank needs the link. Without a bound a worker sends one gradient before it waits for an answer."""


class Cutting:
    """Jobs on two hosts, and the link that is cut under them."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts = hosts
        self.folder = folder
        self.running: list[Future[list[Ended]]] = []

    def has(self, job: str, rank: int, what: str | int) -> bool:
        """Return whether a rank has said something."""
        return (self.folder / f"{job}-{rank}.{what}").exists()

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Return when ``is_so()`` is true, and fail when ranks have ended before."""
        while not is_so():
            for one in self.running:
                assert not one.done(), "\n".join(ended.stderr for ended in one.result())
            time.sleep(0.01)

    def wait_until_ready(self, job: str) -> None:
        """Return when every rank is about to take its next step."""
        ranks = [0, BEHIND] if job.removesuffix("-cut") in SERVED else [0, 1, BEHIND]
        self.wait_until(lambda: all(self.has(job, rank, "ready") for rank in ranks))

    def go(self, job: str) -> None:
        """Let ranks take their next step."""
        (self.folder / f"{job}.go").touch()

    def stay_cut(self, job: str, to_be_taken: Sequence[tuple[int, str]]) -> None:
        """Return when a while has passed, and ranks have come as far as they come without the link."""
        end = time.monotonic() + CUT_SECONDS
        self.wait_until(lambda: time.monotonic() > end and all(self.has(job, *one) for one in to_be_taken))


def of_script(folder: Path, timeout_seconds: float, jobs: Sequence[str]) -> tuple[Path, list[int], *tuple[str, ...]]:
    """Return what the hosts are to run."""
    return SCRIPT, [2, 1], str(folder), str(timeout_seconds), *jobs


@pytest.mark.timeout(120)
def test_a_cut_link_costs_only_time(tmp_path: Path, warm_python: WarmPython) -> None:
    jobs = [job for way in TAKEN for job in ([way, f"{way}-cut"] if way in EXACT else [f"{way}-cut"])]
    with ThreadPoolExecutor() as pool, Hosts(2, python=warm_python) as hosts:
        cutting = Cutting(hosts, tmp_path)
        run = pool.submit(hosts.run_ranks, *of_script(tmp_path, 30.0, jobs), timeout_seconds=100)
        cutting.running = [run]
        for way, to_be_taken in TAKEN.items():
            job = f"{way}-cut"
            cutting.wait_until_ready(job)
            hosts.link(1, up=False)
            cutting.go(job)
            cutting.stay_cut(job, to_be_taken)
            taken = [(rank, step) for rank, step in NOT_TAKEN[way] if cutting.has(job, rank, step)]
            assert taken == [], f"{job}: nothing comes over a link that is cut"
            hosts.link(1, up=True)
        all_ended = run.result()
    assert [ended.exit_code for ended in all_ended] == [0] * 3, all_ended
    of_ranks = [[json.loads(line) for line in ended.stdout.splitlines()] for ended in all_ended]
    found = {job["job"]: [job, *others] for job, *others in zip(*of_ranks, strict=True)}
    assert list(found) == jobs
    for job, of_job in found.items():
        assert len({one["digest"] for one in of_job}) == 1, job
    for way in EXACT:
        assert found[way] == [{**one, "job": way} for one in found[f"{way}-cut"]]
    updates = [found[f"{way}-cut"][SERVER]["num_updates"] for way in ("sync", "async", "stale")]
    assert updates == [NUM_STEPS, 2 * NUM_STEPS, 2 * NUM_STEPS], "each gradient is used once"


@pytest.mark.timeout(90)
def test_a_link_that_stays_cut_is_everyones_error_at_its_limit(tmp_path: Path, warm_python: WarmPython) -> None:
    with ThreadPoolExecutor() as pool, Hosts(2, python=warm_python) as hosts:
        cutting = Cutting(hosts, tmp_path)
        for number, job in enumerate(STAYING):
            env = {"MASTER_PORT": str(PORT + 10 * number), "RANKWISE_SECRET": "of this test"}
            cutting.running += [
                pool.submit(hosts.run_ranks, *of_script(tmp_path, LIMIT_SECONDS, [job]), env=env, timeout_seconds=80)
            ]
        for job in STAYING:
            cutting.wait_until_ready(job)
        hosts.link(1, up=False)
        for job in STAYING:
            cutting.go(job)
        found = [run.result() for run in cutting.running]
    for job, all_ended in zip(STAYING, found, strict=True):
        for rank, ended in enumerate(all_ended):
            named = "rank 0 .* cannot be reached" if rank == BEHIND else "timed out after .* waiting for rank.*2"
            assert ended.exit_code == 1, (job, rank, ended.stderr)
            assert re.search(named, ended.stderr), (job, rank, ended.stderr)
