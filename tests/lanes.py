# SPDX-License-Identifier: Apache-2.0
"""Run pytest in several lanes at once: ``lanes.py ARGUMENT...``, with pytest's arguments.

A lane is a worker of pytest-xdist with a network, processes and shared memory of its own (``tests/lane``). Only root
may make one; without root, or on one core, pytest runs as it always does.
"""

from __future__ import annotations

import compileall
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
LANE = ROOT / "tests" / "lane"
LANES_PER_CORE = 1.5
"""A quarter of its time a test waits: for a limit to pass, a link to come back, a server to notice."""


def main() -> int:
    """Run pytest and return its exit code."""
    # nohup has it ignored, in all processes below: jobs that are tested with it would never end.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # Where Python may not write its bytecode (PYTHONDONTWRITEBYTECODE), every process would compile what has changed.
    for name in ("src", "tests"):
        compileall.compile_dir(ROOT / name, quiet=2)
    if "tests/multiprocess" in sys.argv:
        _build_standin()
    reason = _why_no_lanes()
    if reason:
        sys.stdout.write(f"One lane only: {reason}.\n")
        return _pytest()
    number = int(LANES_PER_CORE * len(os.sched_getaffinity(0)))
    python = shlex.join([str(LANE), sys.executable])
    # pytest's own folder has too long a name for the sockets that tests make in it.
    with tempfile.TemporaryDirectory(prefix="lanes.") as folder:
        return _pytest("--tx", f"{number}*popen//python={python}", "--dist", "worksteal", "--basetemp", f"{folder}/t")


def _build_standin() -> None:
    """Compile the device of tests/standin: a test would reach its limit meanwhile, and each lane would do it."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); import standin; standin.built(sys.argv[2])"
    env = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    words = [sys.executable, "-c", code, str(ROOT / "tests" / "standin")]
    builds = [subprocess.Popen([*words, part], env=env) for part in ("standin", "strict")]
    exit_codes = [build.wait() for build in builds]
    if any(exit_codes):
        sys.exit("tests/standin could not be compiled")


def _pytest(*options: str) -> int:
    sys.stdout.flush()
    return subprocess.run([sys.executable, "-m", "pytest", *options, *sys.argv[1:]], check=False).returncode


def _why_no_lanes() -> str | None:
    if len(os.sched_getaffinity(0)) == 1:
        return "there is one core"
    tried = subprocess.run([LANE, "true"], check=False, capture_output=True, text=True)
    return f"a lane cannot be made here ({tried.stderr.strip()})" if tried.returncode else None


if __name__ == "__main__":
    sys.exit(main())
