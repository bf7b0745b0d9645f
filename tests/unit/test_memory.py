# SPDX-License-Identifier: Apache-2.0
"""Whether the kernel has killed for memory, from what it counts; and the words for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rankwise.launch.report import exit_code, failure, failure_report
from rankwise.launch.report.exit_code import OomCount, oom_kills
from rankwise.launch.report.failure import FailedAttempt

if TYPE_CHECKING:
    from pathlib import Path

V1 = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"
V2 = "low 0\nhigh 0\nmax 31\noom 2\noom_kill {}\noom_group_kill 0\n"
VMSTAT = "pgfault 77\noom_kill {}\nnuma_hit 1\n"
V1_GROUPS = "9:name=systemd:/\n5:cpu,cpuacct:/\n4:memory:/job/7\n0::/\n"
V2_GROUPS = "0::/user.slice/job-7.scope\n"


@pytest.mark.parametrize("text", [V1, V2, VMSTAT])
def test_the_count_is_read_in_every_form(text: str) -> None:
    assert oom_kills(text.format(3)) == 3
    assert oom_kills(text.replace("oom_kill {}", "oom_kills {}")) is None
    assert oom_kills(text.format("many")) is None


def _write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("groups", "path", "text"),
    [
        (V1_GROUPS, "sys/fs/cgroup/memory/job/7/memory.oom_control", V1),
        (V1_GROUPS, "sys/fs/cgroup/memory/memory.oom_control", V1),
        (V2_GROUPS, "sys/fs/cgroup/user.slice/job-7.scope/memory.events", V2),
        (V2_GROUPS, "sys/fs/cgroup/memory.events", V2),
        ("", "proc/vmstat", VMSTAT),
    ],
    ids=["v1", "v1 in a container", "v2", "v2 in a container", "no group"],
)
def test_a_count_that_has_risen_is_seen(tmp_path: Path, groups: str, path: str, text: str) -> None:
    _write(tmp_path, "proc/self/cgroup", groups)
    _write(tmp_path, "proc/vmstat", VMSTAT.format(90))
    _write(tmp_path, path, text.format(2))
    count = OomCount(str(tmp_path))
    assert count.has_risen() is False
    if path != "proc/vmstat":
        _write(tmp_path, "proc/vmstat", VMSTAT.format(91))
        assert count.has_risen() is False, "that was somebody else's"
    _write(tmp_path, path, text.format(3))
    assert count.has_risen() is True


def test_no_report_if_nothing_can_be_read(tmp_path: Path) -> None:
    assert OomCount(str(tmp_path)).has_risen() is None


def test_the_texts() -> None:
    def words(*, out_of_memory: bool | None) -> str:
        killed = failure.from_exit(1, -9, 0.0, out_of_memory=out_of_memory)
        return failure_report.whole(
            FailedAttempt(attempt=0, world_size=2, failures=(killed,), ends={}, hostname="gpu-01")
        )

    who = "[rankwise] rank 1 of 2 (gpu-01) failed first: killed by SIGKILL, exit code 137; "
    kernel = "by the kernel: the machine was out of memory, or a memory limit was reached"
    assert words(out_of_memory=True).startswith(f"{who}{kernel}\n[rankwise] what to do: a smaller global_batch_size")
    other = "by a user, a program or a scheduler, not by the kernel's out-of-memory killer"
    assert words(out_of_memory=False) == f"{who}{other}\n"
    assert "if no one killed it" in words(out_of_memory=None)
    assert failure.from_exit(1, -15, 0.0, out_of_memory=True).how == "", "the kernel kills with SIGKILL"


def test_a_stopped_rank_and_a_lost_machine_have_messages() -> None:
    def words(failed: failure.Failure) -> str:
        return failure_report.whole(
            FailedAttempt(attempt=0, world_size=2, failures=(failed,), ends={}, hostname="gpu-02")
        )

    assert words(failure.from_stop(1, 31.4, 0.0)) == (
        "[rankwise] rank 1 of 2 (gpu-02) failed first: "
        "stopped for 31 s by SIGSTOP, Ctrl-Z or a debugger, while the other ranks were running\n"
    )
    assert words(failure.from_lost_node(1, "gpu-02", 0.0)) == (
        "[rankwise] rank 1 of 2 (gpu-02) failed first: gpu-02 was lost: "
        "the machine or its network went down, or its launcher was killed\n"
    )
    assert exit_code.shell_code(failure.from_stop(1, 31.4, 0.0).exit_code) == 147
