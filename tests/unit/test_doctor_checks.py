# SPDX-License-Identifier: Apache-2.0
"""What the doctor says of facts, without a machine that has them."""

from __future__ import annotations

import json
import os
import resource
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import pytest

from rankwise.cli.doctor import as_json, as_text
from rankwise.doctor import checks, examine
from rankwise.doctor.checks import SHARED_MEMORY, CheckResult, judge
from rankwise.doctor.examine import Examination
from rankwise.doctor.facts import Across, ExaminedJob, Facts, Machine, Timing
from rankwise.insight.measuring import ahead_of
from rankwise.launch.messages import value_of
from rankwise.world.network import Interface, Route

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MACHINE = Machine(
    hostname="gpu-00",
    versions={"python": "3.11.7", "torch": "2.13.0", "rankwise": "0.1.0"},
    gpus=("H100", "H100"),
    num_gpu_files=2,
    backends=("gloo", "nccl"),
    interfaces=(
        Interface(name="eth0", addresses=("10.0.0.1",), is_up=True, is_loopback=False),
        Interface(name="lo", addresses=("127.0.0.1",), is_up=True, is_loopback=True),
    ),
    own_name_addresses=("10.0.0.1",),
    own_addresses=("10.0.0.1",),
    free_port_error="",
    port=0,
    port_error="",
    shared_memory_bytes=64 * 2**30,
    shared_memory_free_bytes=64 * 2**30,
    open_files_limit=65536,
    open_files_hard_limit=65536,
    processes_limit=-1,
    cores=tuple(range(8)),
    num_threads=4,
)
ROUTE = Route(interface="eth0", local_address="10.0.0.2", remote_address="10.0.0.1")


def job(ranks_per_host: tuple[int, ...] = (2, 2), **more: Any) -> ExaminedJob:
    """Return a job in which nothing is wrong."""
    places = [(host, local) for host, count in enumerate(ranks_per_host) for local in range(count)]
    ranks = []
    for rank, (host, local) in enumerate(places):
        across = Across(store_route=ROUTE)
        if local == 0 and len(ranks_per_host) > 1:
            across = replace(across, routes={f"gpu-0{1 - host}": ROUTE}, clock_ahead_seconds=0.001 if host else None)
        ranks.append(
            Facts(
                rank=rank,
                world_size=len(places),
                source="torchrun",
                store="10.0.0.1 port 29500",
                machine=replace(MACHINE, hostname=f"gpu-0{host}"),
                across=across,
            )
        )
    return ExaminedJob(ranks=tuple(ranks), **more)


def changed(whole: ExaminedJob, rank: int, **machine: Any) -> ExaminedJob:
    """Return ``whole`` with another machine under one rank."""
    ranks = list(whole.ranks)
    ranks[rank] = replace(ranks[rank], machine=replace(ranks[rank].machine, **machine))
    return replace(whole, ranks=tuple(ranks))


def across(whole: ExaminedJob, rank: int, **found: Any) -> ExaminedJob:
    """Return ``whole`` with something else found by one rank."""
    ranks = list(whole.ranks)
    ranks[rank] = replace(ranks[rank], across=replace(ranks[rank].across or Across(), **found))
    return replace(whole, ranks=tuple(ranks))


def bad(whole: ExaminedJob) -> list[tuple[str, str, str]]:
    """Return check, level and words of what is not ok; each says what to do."""
    found = [finding for finding in judge(whole) if finding.level != "ok"]
    assert all(finding.do for finding in found)
    return [(finding.check, finding.level, finding.what) for finding in found]


@pytest.mark.parametrize("ranks_per_host", [(1,), (2,), (2, 2), (1, 2)])
def test_a_sound_job_has_no_findings(ranks_per_host: tuple[int, ...]) -> None:
    timings = (Timing(num_bytes=4096, seconds=1e-4), Timing(num_bytes=25 * 2**20, seconds=0.01))
    sound = job(ranks_per_host, shared_folder="/scratch", timings=timings if sum(ranks_per_host) > 1 else ())
    assert bad(sound) == []
    assert len({finding.check for finding in judge(sound)}) >= 10


TWO_HOSTS = job()
SICK: list[tuple[ExaminedJob, tuple[str, str, str]]] = [
    (
        changed(TWO_HOSTS, 3, versions={**MACHINE.versions, "torch": "2.12.1"}),
        ("versions", "error", "torch differs: ranks 0-2: 2.13.0; rank 3: 2.12.1"),
    ),
    (
        changed(TWO_HOSTS, 0, versions={**MACHINE.versions, "python": "3.12.0"}),
        ("versions", "warning", "python differs: rank 0: 3.12.0; ranks 1-3: 3.11.7"),
    ),
    (
        changed(TWO_HOSTS, 1, versions={**MACHINE.versions, "nccl": "2.28.3"}),
        ("versions", "error", "nccl differs: ranks 0, 2-3: missing; rank 1: 2.28.3"),
    ),
    (
        changed(changed(job((2,)), 0, gpus=()), 1, gpus=()),
        ("GPUs", "warning", "gpu-00 has 2 GPUs, but torch can use none of them"),
    ),
    (
        changed(TWO_HOSTS, 2, gpus=("H100",)),
        ("GPUs", "warning", "ranks see different GPUs: ranks 0-1, 3: 2x H100; rank 2: 1x H100"),
    ),
    (
        changed(TWO_HOSTS, 2, backends=("gloo",)),
        ("GPUs", "error", "torch on gpu-01 has GPUs but no NCCL"),
    ),
    (
        changed(TWO_HOSTS, 2, own_addresses=()),
        ("network", "error", "gpu-01 has no address that other hosts can reach"),
    ),
    (
        across(TWO_HOSTS, 2, no_routes={"gpu-00": "10.0.0.1: Network is unreachable"}),
        ("network", "error", "no route from gpu-01 to gpu-00: 10.0.0.1: Network is unreachable"),
    ),
    (
        changed(TWO_HOSTS, 0, own_name_addresses=("127.0.1.1",)),
        ("own name", "warning", "gpu-00 resolves its own name to 127.0.1.1, which others cannot reach"),
    ),
    (
        changed(job((1,)), 0, own_name_addresses=()),
        ("own name", "warning", "gpu-00 cannot resolve its own name, which other programs may need"),
    ),
    (
        changed(TWO_HOSTS, 2, free_port_error="Permission denied"),
        ("ports", "error", "no port can be bound on gpu-01: Permission denied"),
    ),
    (
        changed(job((1,)), 0, port=29500, port_error="Address already in use"),
        ("ports", "warning", "port 29500 on gpu-00: Address already in use"),
    ),
    (
        changed(TWO_HOSTS, 2, shared_memory_bytes=64 * 2**20),
        (SHARED_MEMORY, "warning", f"{SHARED_MEMORY} on gpu-01 has 64 MiB; loader workers may be killed by SIGBUS"),
    ),
    (
        changed(TWO_HOSTS, 0, shared_memory_bytes=0),
        (SHARED_MEMORY, "warning", f"{SHARED_MEMORY} on gpu-00 does not exist; loader workers may be killed by SIGBUS"),
    ),
    (
        changed(TWO_HOSTS, 0, shared_memory_free_bytes=3 * 2**20),
        (SHARED_MEMORY, "warning", f"{SHARED_MEMORY} on gpu-00 has 3 MiB left"),
    ),
    (
        changed(TWO_HOSTS, 2, open_files_limit=256),
        ("open files", "warning", "256 per process on gpu-01; 1024 may be needed"),
    ),
    (
        changed(TWO_HOSTS, 2, processes_limit=100),
        ("processes", "warning", "100 processes and threads on gpu-01; 384 may be needed"),
    ),
    (
        changed(TWO_HOSTS, 2, num_threads=8),
        ("threads", "warning", "2 ranks on gpu-01 use 12 compute threads on 8 cores"),
    ),
    (
        changed(TWO_HOSTS, 2, cores=(0,)),
        ("threads", "warning", "rank 2 on gpu-01 may use 1 core but uses more compute threads"),
    ),
    (
        across(TWO_HOSTS, 2, clock_ahead_seconds=-2.5, clock_error_seconds=0.4),
        ("clocks", "warning", "gpu-01 is 2.5 s behind rank 0's host"),
    ),
    (
        across(TWO_HOSTS, 2, clock_ahead_seconds=3600.0),
        ("clocks", "error", "gpu-01 is 3600.0 s ahead of rank 0's host"),
    ),
    (
        across(job(shared_folder="/scratch"), 2, shared_folder_error="No such file or directory"),
        ("shared folder", "error", "gpu-01 does not share /scratch with rank 0: No such file or directory"),
    ),
    (
        across(job(timings=(Timing(num_bytes=4096, seconds=0.1),)), 3, wrong_from=(2,)),
        ("values", "error", "rank 3 received wrong values from rank 2"),
    ),
    (
        across(job(timings=(Timing(num_bytes=4096, seconds=0.1),)), 1, wrong_sum_bytes=(4096, 2**20)),
        ("values", "error", "all_reduce of 4 KiB, 1 MiB gave rank 1 wrong values"),
    ),
    (
        job(timings=(Timing(num_bytes=2**20, seconds=0.1),)),
        ("all_reduce", "warning", "slower than 1 Gbit/s: 1 MiB 100.00 ms (0.02 GB/s)"),
    ),
]


@pytest.mark.parametrize(("whole", "expected"), SICK, ids=[words for _, (_, _, words) in SICK])
def test_problems_are_found_and_nothing_else(whole: ExaminedJob, expected: tuple[str, str, str]) -> None:
    assert bad(whole) == [expected]


@pytest.mark.parametrize(
    "whole",
    [
        # Not certain: the measurement may be off by as much.
        across(TWO_HOSTS, 2, clock_ahead_seconds=1.5, clock_error_seconds=0.6),
        # Slow only within a host, where there is no network to choose; or a small tensor.
        job((2,), timings=(Timing(num_bytes=2**20, seconds=0.1),)),
        job(timings=(Timing(num_bytes=4096, seconds=0.1),)),
        # On one machine its own name may be loopback.
        changed(job((1,)), 0, own_name_addresses=("127.0.1.1",)),
    ],
)
def test_correct_code_that_looks_wrong_is_not_reported(whole: ExaminedJob) -> None:
    assert bad(whole) == []


def test_every_check_can_find_something_or_only_tells() -> None:
    telling: set[Callable[[ExaminedJob], list[CheckResult]]] = {checks.store}
    silent = {
        check.__name__
        for check in set(checks.CHECKS) - telling
        if all(finding.level == "ok" for whole, _ in SICK for finding in check(whole))
    }
    assert silent == set()


@pytest.mark.parametrize(
    ("user", "limits", "expected"),
    [
        (1000, (resource.RLIM_INFINITY, "100"), 100),
        (1000, (resource.RLIM_INFINITY, "max"), examine.NO_LIMIT),
        (1000, (50, "100"), 50),
        (1000, (50, "max"), 50),
        # The kernel does not hold root to its own limit.
        (0, (50, "100"), 100),
    ],
)
def test_the_lowest_limit_of_processes_that_holds_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: int, limits: tuple[int, str], expected: int
) -> None:
    of_user, of_container = limits
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/pids.max").write_text(f"{of_container}\n")
    monkeypatch.setattr(examine, "Path", lambda name: tmp_path / name.lstrip("/"))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (of_user, of_user))
    monkeypatch.setattr(os, "geteuid", lambda: user)
    machine = examine.examined_machine()
    assert machine.processes_limit == expected
    found = bad(changed(job((1,)), 0, processes_limit=machine.processes_limit))
    assert [check for check, _, _ in found] == ["processes"] * (expected != examine.NO_LIMIT)


def test_facts_survive_their_way_as_text() -> None:
    assert value_of(Machine, json.loads(json.dumps(asdict(MACHINE)))) == MACHINE
    for facts in TWO_HOSTS.ranks:
        assert facts.across is not None
        assert value_of(Across, json.loads(json.dumps(asdict(facts.across)))) == facts.across


@pytest.mark.parametrize("ahead", [-100.0, 0.0, 0.25, 1e6])
@pytest.mark.parametrize(("there", "back"), [(0.0, 0.0), (0.3, 0.0), (0.0, 0.3), (0.1, 0.2)])
def test_the_clock_offset_is_as_exact_as_reported(ahead: float, there: float, back: float) -> None:
    asked = 1_000.0 + ahead
    told = 1_000.0 + there
    error, found = ahead_of(asked, told, asked + there + back)
    assert abs(found - ahead) <= error + 1e-9
    assert error == pytest.approx((there + back) / 2)


def test_the_table_shows_each_finding_with_what_to_do() -> None:
    findings = (
        CheckResult(check="versions", level="ok", what="torch 2.13.0"),
        CheckResult(check="clocks", level="warning", what="gpu-01 is late", do="timedatectl"),
        CheckResult(
            check="join", level="error", what="rank 1 never came", do="start it\nor do not", evidence="seen: 0"
        ),
    )
    assert as_text(Examination(job=TWO_HOSTS, findings=findings, speaks=True)) == (
        "rankwise doctor: 4 ranks on 2 hosts, started by torchrun\n"
        "  ok       versions  torch 2.13.0\n"
        "  warning  clocks    gpu-01 is late\n"
        "                     do: timedatectl\n"
        "  error    join      rank 1 never came\n"
        "                     seen: 0\n"
        "                     do: start it\n"
        "                     do: or do not\n"
        "1 error, 1 warning\n"
    )


def test_the_json_has_the_findings_and_all_facts() -> None:
    findings = (CheckResult(check="clocks", level="warning", what="gpu-01 is late", do="timedatectl"),)
    read = json.loads(as_json(Examination(job=TWO_HOSTS, findings=findings, speaks=True)))
    assert [one["what"] for one in read["findings"]] == ["gpu-01 is late"]
    assert [facts["machine"]["hostname"] for facts in read["ranks"]] == ["gpu-00", "gpu-00", "gpu-01", "gpu-01"]
    assert read["ranks"][0]["across"]["store_route"]["interface"] == "eth0"


@pytest.mark.parametrize(("version", "is_told"), [("2.13.0", False), ("2.15.0+cu132", False), ("2.99.1", True)])
def test_an_untested_torch_is_reported(version: str, is_told: bool) -> None:
    one_rank = changed(job((1,)), 0, versions={**MACHINE.versions, "torch": version})
    found = [finding.what for finding in judge(one_rank) if "was not tested on" in finding.what]
    assert len(found) == is_told
    assert all(version in what for what in found)
