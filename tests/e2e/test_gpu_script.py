# SPDX-License-Identifier: Apache-2.0
"""``make gpu`` without a GPU: the same script on the CPU, with few checks, and with parts that hang and fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.e2e.conftest import Command

pytestmark = pytest.mark.timeout(150)
LIMIT_SECONDS = 140
HERE = Path(__file__).parent
FOLDER = HERE.parent / "gpu"
MADE_UP = f"""
import sys
sys.path.insert(0, {str(FOLDER)!r})
import run
run.PARTS[:] = [
    run.Part("hangs", "gpu_script_hang", "HANGS", 8, "a process that does not end"),
    run.Part("fails", "gpu_script_parts", "FAILS", 100, "three checks"),
]
sys.exit(run.main())
"""


def results_of(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "results.json").read_text())["parts"]


def test_parts_run_in_order_and_say_what_they_saw(command: Command) -> None:
    out = command.folder / "out"
    words = ["--only", "odd sizes, 2", "late", "CUDA graph", "float16"]
    done = command.python(
        *[str(FOLDER / "run.py"), "graph", "failures", "promises", "--device", "cpu", *words],
        env={"OUT": str(out)},
        seconds=LIMIT_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    facts, *lines = done.stdout.splitlines()
    assert "torch" in facts
    assert [line.split()[:2] for line in lines] == [["ok", "promises"], ["ok", "failures"], ["not", "run"]]
    assert [[one["result"] for one in part["checks"]] for part in results_of(out)] == [["ok"], ["ok"], ["not run"] * 2]
    table = (out / "devices.md").read_text()
    assert "2 checks ok, 2 checks not run" in table
    assert "| promises | odd sizes, 2 ranks | ok |" in table


def test_a_part_that_hangs_is_ended_with_its_children_and_the_next_one_runs(command: Command) -> None:
    out = command.folder / "out"
    done = command.python(
        "-c", MADE_UP, "--device", "cpu", env={"OUT": str(out), "PYTHONPATH": str(HERE)}, seconds=LIMIT_SECONDS
    )
    assert done.returncode == 1, done.stdout + done.stderr
    hangs, fails = results_of(out)
    assert (hangs["result"], hangs["how"]) == ("failed", "stopped after 8 s")
    assert [one["result"] for one in fails["checks"]] == ["failed", "not run", "ok"]
    assert "ValueError" in fails["checks"][0]["traceback"]
    assert "| fails | fails | failed | ValueError: one \\| two |" in (out / "devices.md").read_text()


def test_a_machine_without_a_gpu_is_told(command: Command) -> None:
    done = command.python(str(FOLDER / "run.py"), env={"OUT": str(command.folder)}, seconds=LIMIT_SECONDS)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout.startswith("no cuda device here (exit code 2)")
