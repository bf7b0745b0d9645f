# SPDX-License-Identifier: Apache-2.0
"""Run ``rankwise verify`` on scripts with a mistake of one line, and on correct ones; print what it finds.

``python tests/faults/run.py [words]``: those with one of the words in their name or script. Takes about ten minutes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Case:
    """One script, as it is verified."""

    name: str
    script: str
    text: str
    cause: str | None
    """``None``: it is correct."""
    options: tuple[str, ...] = ()
    """Of ``rankwise verify``."""


def cases() -> list[Case]:
    content = tomllib.loads((HERE / "faults.toml").read_text(encoding="utf-8"))
    return [_case(one, one["cause"]) for one in content["fault"]] + [_case(one, None) for one in content["correct"]]


def _case(entry: dict[str, Any], cause: str | None) -> Case:
    text = (HERE / "scripts" / f"{entry['script']}.py").read_text(encoding="utf-8")
    edits = [(entry["old"], entry["new"])] if "old" in entry else []
    for old, new in [*edits, *entry.get("also", [])]:
        if text.count(old) != 1:
            raise ValueError(f"{entry['name']}: {old!r} stands {text.count(old)} times in {entry['script']}.py")
        text = text.replace(old, new)
    return Case(entry["name"], entry["script"], text, cause, tuple(entry.get("options", [])))


def verify(case: Case, folder: Path) -> tuple[dict[str, Any], float]:
    """Verify a case in a folder of its own; return the report and the seconds it took."""
    (folder / "train.py").write_text(case.text, encoding="utf-8")
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "rankwise", "verify", "--json", "-", *case.options, "train.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    if not done.stdout:
        raise RuntimeError(f"{case.name}: {done.stderr}")
    return json.loads(done.stdout), time.monotonic() - began


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("words", nargs="*")
    words = parser.parse_args().words
    chosen = [case for case in cases() if not words or any(word in f"{case.script} {case.name}" for word in words)]
    found = named = false = 0
    for case in chosen:
        with tempfile.TemporaryDirectory() as folder:
            report, seconds = verify(case, Path(folder))
        verdict = report["verdicts"][0]
        cause = verdict["cause"]["key"] if verdict["cause"] else ""
        is_found, is_named = report["exit_code"] == 1, cause == case.cause
        found += case.cause is not None and is_found
        named += case.cause is not None and is_found and is_named
        false += case.cause is None and report["exit_code"] != 0
        mark = "ok" if (is_named and is_found if case.cause else report["exit_code"] == 0) else "NOT"
        of_runs = seconds / sum(took for words, took in report["runs"] if words in {"1 rank", "2 ranks"})
        where = f"{verdict['first']['step']} {verdict['first']['phase']}" if verdict["first"] else verdict["why"]
        line = f"{mark:4}{report['exit_code']} {case.script:16}{case.name:44}{cause:20}{where:28}{seconds:5.1f} s"
        print(f"{line}  x{of_runs:.2f}", flush=True)
    faults = sum(case.cause is not None for case in chosen)
    print(
        f"{found} of {faults} mistakes found, {named} with their cause; {false} of {len(chosen) - faults} false alarms"
    )
    return int(found < faults or named < faults or false > 0)


if __name__ == "__main__":
    sys.exit(main())
