# SPDX-License-Identifier: Apache-2.0
"""Runs rankwise on a real GPU for at most eight minutes, and says what it saw: ``make gpu``.

Needs no network and installs nothing: rankwise runs from this checkout, with the Python that runs this file. Each part
runs in a process of its own, with a limit; a failed part does not end it. A line of result as each part ends, the most
important parts first. Writes ``devices.md`` (a table for ``docs/devices.md``), ``results.json`` with every traceback,
and the output of each part into ``$OUT``, by default ``build/gpu``, again after each part. Exit status: 1 if a check
failed, 2 if there is no such device.

``--device strict``, ``standin`` or ``cpu`` tries the script without a GPU, with small models, without measuring: on the
stand-in device of ``tests/standin`` with its backend that is as strict as NCCL, on that device without a backend, or on
the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import json
import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TOTAL_SECONDS = 480.0
FACTS = "facts"
FACTS_SECONDS = 60.0
ADOPT_ORPHANS = 36
"""PR_SET_CHILD_SUBREAPER: processes whose parent has exited become children of this one."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part: a list of checks in a module of this folder."""

    name: str
    module: str
    checks: str
    limit_seconds: float
    what: str


PARTS = [
    Part("one", "promise", "ONE_RANK", 60, "1 rank: join, collectives, replicate, launcher, doctor"),
    Part("promises", "promise", "PROMISES", 110, "2 and 4 ranks against 1 CPU rank, float64"),
    Part("failures", "failing", "FAILURES", 60, "a late rank, a killed rank, abort"),
    Part("syncs", "queueing", "SYNCS", 45, "host synchronisations of a steady step"),
    Part("strategies", "strategies", "STRATEGIES", 75, "every strategy that fits on one device"),
    Part("tools", "strategies", "TOOLS", 100, "autocast, loader, checkpoints, torch.compile"),
    Part("graph", "queueing", "GRAPH", 40, "a step in a CUDA graph"),
    Part("random", "promise", "RANDOM_NUMBERS", 30, "random numbers of the device and of the CPU"),
    Part("speed", "speed", "SPEED", 150, "a step against plain PyTorch and DDP, 1 rank"),
    Part("several", "several", "SEVERAL", 240, "all strategies with a device per rank"),
]


def check_all(module: str, checks: str, kind: str, records: Path, only: list[str]) -> None:
    """Run the checks of a part in this process, and append what each found to ``records``."""
    # Once, and not in each rank: an optimizer's first step imports it, which takes seconds.
    multiprocessing.set_forkserver_preload(["rankwise.testing", "numpy", "torch._dynamo"])
    forkserver.ensure_running()
    found_checks = getattr(importlib.import_module(module), checks)
    from setting import NotPossible, Setting

    setting = Setting(kind)
    for check in found_checks:
        if only and not any(word in check.name for word in only):
            continue
        began = time.monotonic()
        found: dict[str, Any] = {"check": check.name, "result": "ok"}
        try:
            found["figures"] = check.run(setting)
        except NotPossible as reason:
            found |= {"result": "not run", "figures": str(reason)}
        except Exception as error:  # noqa: BLE001 - the next checks run all the same
            first = next(iter(str(error).strip().splitlines()), "")
            found |= {"result": "failed", "figures": f"{type(error).__name__}: {first}"[:300]}
            found["traceback"] = traceback.format_exc()
            if isinstance(error, NotImplementedError) and not setting.is_cuda:
                found["result"] = "not run"
        found["seconds"] = round(time.monotonic() - began, 1)
        with records.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")


def write_facts(kind: str, records: Path) -> None:
    """Write what this machine is; exit with 2 if torch sees no such device."""
    import torch

    from rankwise.version import VERSION
    from rankwise.world.device import accelerator

    if kind != "cpu" and (not torch.accelerator.is_available() or accelerator.shown_kind().name != kind):
        sys.exit(2)
    nccl = accelerator.nccl_version()
    facts = {
        "device": torch.get_device_module(kind).get_device_name(0) if kind != "cpu" else platform.processor() or "CPU",
        "count": torch.accelerator.device_count() if kind != "cpu" else os.cpu_count(),
        "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cuda": torch.version.cuda,
        "nccl": nccl and ".".join(map(str, nccl)),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "rankwise": f"{VERSION} {_first_line('git', '-C', str(ROOT), 'describe', '--always', '--dirty')}".strip(),
    }
    records.write_text(json.dumps(facts) + "\n", encoding="utf-8")


def _first_line(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.partition("\n")[0].strip() if not done.returncode else ""


class Run:
    """One run of the script: its folder, its limit, and what its parts have found."""

    def __init__(self, kind: str, limit_seconds: float, only: list[str]) -> None:
        self.kind = "standin" if kind == "strict" else kind
        self._name = kind
        self._only = only
        self._ends = time.monotonic() + limit_seconds
        self._factor = max(1.0, limit_seconds / TOTAL_SECONDS)
        self._out = Path(os.environ.get("OUT") or ROOT / "build" / "gpu")
        self._out.mkdir(parents=True, exist_ok=True)
        self._facts: dict[str, Any] = {}
        self._parts: list[dict[str, Any]] = []
        self._date = time.strftime("%Y-%m-%d")

    def read_facts(self) -> bool:
        """Print what this machine is; return whether it has the device."""
        found, how, _ = self._start(FACTS, FACTS, FACTS_SECONDS * self._factor)
        if not found:
            print(f"no {self.kind} device here ({how}); its output: {self._out / FACTS}.log", flush=True)
            return False
        self._facts = found[0]
        print(", ".join(f"{name} {value}" for name, value in self._facts.items() if value), flush=True)
        return True

    def run(self, part: Part) -> None:
        """Run a part, print its line, and write all results again."""
        limit = min(part.limit_seconds * self._factor, self._ends - time.monotonic())
        if limit <= 0:
            checks, how, seconds = [], "not run: the time is up", 0.0
        else:
            checks, how, seconds = self._start(part.name, f"{part.module}:{part.checks}", limit)
        self._parts.append(
            {"part": part.name, "what": part.what, "how": how, "seconds": round(seconds, 1), "checks": checks}
        )
        failed = [one for one in checks if one["result"] == "failed"]
        result = "failed" if failed or how != "ended" else "ok" if _num_ok(checks) else "not run"
        words = [f"{_num_ok(checks)} ok"] + [f"{len(failed)} failed"] * bool(failed)
        shown = failed or [one for one in checks if one["result"] == "ok"]
        figures = "; ".join(f"{one['check']}: {one['figures']}" for one in shown)
        how = "" if how == "ended" else f" ({how})"
        print(f"{result:8}{part.name:11}{seconds:6.1f} s  {', '.join(words)}{how}; {figures}", flush=True)
        self._parts[-1]["result"] = result
        self._write()

    @property
    def has_failed(self) -> bool:
        """Whether a part has failed."""
        return any(part["result"] == "failed" for part in self._parts)

    def _start(self, name: str, part: str, limit_seconds: float) -> tuple[list[dict[str, Any]], str, float]:
        """Run this file for one part; return its records, how it ended, and after how many seconds."""
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="rankwise-gpu-", ignore_cleanup_errors=True) as folder:
            records = Path(folder, "records")
            command = [sys.executable, str(HERE / "run.py"), "--device", self.kind]
            command += ["--part", part, "--records", str(records), "--only", *self._only]
            paths = [ROOT / "src", ROOT / "tests" / "multiprocess", HERE]
            paths += [ROOT / "tests" / "standin"] if self.kind == "standin" else []
            env = os.environ | {
                "PYTHONPATH": os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")]),
                "TMPDIR": folder,
                "NCCL_MULTI_RANK_GPU_ENABLE": "1",
                "HF_HUB_OFFLINE": "1",
            }
            env |= {"STANDIN_BACKEND": "strict"} if self._name == "strict" else {}
            with (self._out / f"{name}.log").open("w", encoding="utf-8") as log:
                process = subprocess.Popen(
                    command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0
                )
                try:
                    code = process.wait(limit_seconds)
                    how = "ended" if code == 0 else f"exit code {code}"
                except subprocess.TimeoutExpired:
                    how = f"stopped after {limit_seconds:.0f} s"
                finally:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                    _kill_children()
            lines = records.read_text(encoding="utf-8").splitlines() if records.exists() else []
        return [json.loads(line) for line in lines], how, time.monotonic() - began

    def _write(self) -> None:
        results = {"date": self._date, "facts": self._facts, "parts": self._parts}
        (self._out / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        (self._out / "devices.md").write_text(self._table(), encoding="utf-8")

    def _table(self) -> str:
        facts = self._facts
        where = ", ".join(
            f"{title} {facts[name]}"
            for name, title in [("driver", "driver"), ("cuda", "CUDA"), ("nccl", "NCCL"), ("torch", "torch")]
            if facts.get(name)
        )
        command = "make gpu" if self.kind == "cuda" else f"tests/gpu/run.py --device {self._name}"
        totals = [one["result"] for part in self._parts for one in part["checks"]]
        what = ", ".join(f"{totals.count(result)} checks {result}" for result in dict.fromkeys(totals))
        lines = [
            "| device | what | where | when | command |",
            "|---|---|---|---|---|",
            f"| {facts['device']} | {what} | {where} | {self._date}, rankwise {facts['rankwise']} | `{command}` |",
            "",
            "| part | what was run | result | figures | seconds |",
            "|---|---|---|---|---|",
        ]
        for part in self._parts:
            seconds = part["seconds"]
            if not part["checks"] or part["how"] != "ended":
                lines.append(f"| {part['part']} | {part['what']} | {part['result']} | {part['how']} | {seconds} |")
            lines += [
                f"| {part['part']} | {one['check']} | {one['result']} | {_cell(one['figures'])} | {one['seconds']} |"
                for one in part["checks"]
            ]
        return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _num_ok(checks: list[dict[str, Any]]) -> int:
    return sum(one["result"] == "ok" for one in checks)


def _kill_children() -> None:
    """Kill what has left the part's process group: processes below this one, also those whose parents have exited."""
    while children := [
        int(word)
        for path in Path(f"/proc/{os.getpid()}/task").glob("*/children")
        for word in path.read_text(encoding="utf-8").split()
    ]:
        for number in children:
            os.kill(number, signal.SIGKILL)
            os.waitpid(number, 0)


def main() -> int:
    """Run the parts that are wanted, or one part's checks in this process."""
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"default: all of {', '.join(names)}")
    parser.add_argument("--device", default="cuda", choices=["cuda", "strict", "standin", "cpu"])
    parser.add_argument(
        "--seconds", type=float, default=TOTAL_SECONDS, help="limit of all parts together; more for each, too"
    )
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="checks whose name contains a word")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--records", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part == FACTS:
        write_facts(given.device, given.records)
        return 0
    if given.part:
        check_all(*given.part.split(":"), given.device, given.records, given.only)
        return 0
    if unknown := set(given.parts) - set(names):
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(names)}")
    ctypes.CDLL(None).prctl(ADOPT_ORPHANS, 1, 0, 0, 0)
    run = Run(given.device, given.seconds, given.only)
    if not run.read_facts():
        return 2
    for part in PARTS:
        if not given.parts or part.name in given.parts:
            run.run(part)
    return 1 if run.has_failed else 0


if __name__ == "__main__":
    sys.exit(main())
