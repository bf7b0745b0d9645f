# SPDX-License-Identifier: Apache-2.0
"""Puts small mistakes into a copy of the code, one at a time, and says which of them the tests of their room notice.

Arguments: words; only mistakes with one of them in their file's name or their own run. Exit status: 0 where at least
``NOTICED`` of them were noticed. A mistake is an entry of a TOML file beside this one:

    [[mistake]]
    what = "the sum is divided twice"
    path = "src/rankwise/replicate/gradients.py"
    old = "total / count"                             # stands in the file once
    new = "total / count / count"
    tests = ["tests/multiprocess/test_promise.py"]    # of the room, as pytest takes them
    environment = ".venv-frameworks"                  # that runs them; left out: the one that runs this

Run by ``make mutants``. Takes as long as the tests of every mistake together: it is not part of CI.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NOTICED = 0.9
"""The part of the mistakes that is to be noticed."""
LIMIT_SECONDS = 900


@dataclass(frozen=True, kw_only=True, slots=True)
class Mistake:
    """A change that a careless hand could make."""

    what: str
    path: str
    old: str
    new: str
    tests: list[str]
    environment: str = ""

    @property
    def python(self) -> str:
        """What runs the tests."""
        return str(ROOT / self.environment / "bin" / "python") if self.environment else sys.executable


def read_mistakes(words: list[str]) -> list[Mistake]:
    """Return the mistakes of all files, or those that one of the words is part of."""
    found: list[Mistake] = []
    for path in sorted(HERE.glob("*.toml")):
        entries = [Mistake(**entry) for entry in tomllib.loads(path.read_text()).get("mistake", [])]
        found += [one for one in entries if not words or any(word in f"{path.stem} {one.what}" for word in words)]
    return found


def apply(mistake: Mistake, copy: Path) -> None:
    """Put a mistake into the copy."""
    path = copy / mistake.path
    text = path.read_text()
    if text.count(mistake.old) != 1:
        sys.exit(f"{mistake.what}: {mistake.path} holds {mistake.old!r} {text.count(mistake.old)} times, not once")
    path.write_text(text.replace(mistake.old, mistake.new))


def run_tests(python: str, tests: list[str], copy: Path) -> subprocess.CompletedProcess[str]:
    """Run tests of the copy, up to the first failure, in a session of their own."""
    return subprocess.run(
        # pytest's own folder has too long a name for the sockets that tests make in it.
        [python, "-m", "pytest", "-x", "-q", "--no-header", "--basetemp", str(copy.parent / "t"), *tests],
        cwd=copy,
        # Before the folder of the installed one. What is compiled for a mistake must not outlive it.
        env={**os.environ, "PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_SECONDS,
        start_new_session=True,
    )


def judge(mistake: Mistake, done: subprocess.CompletedProcess[str] | None, copy: Path) -> tuple[bool, str]:
    """Return whether tests noticed a mistake, which the copy no longer holds, and pytest's word on it."""
    if done is None:
        return True, f"no end within {LIMIT_SECONDS} s"
    # Other numbers than 1 say that no test ran: a wrong name, a mistake that is not Python.
    if done.returncode not in {0, 1}:
        sys.exit(f"{mistake.what}: pytest ended with {done.returncode}\n{done.stdout}{done.stderr}")
    lines = done.stdout.strip().splitlines() or ["(no output)"]
    evidence = next((line for line in lines if line.startswith(("FAILED ", "ERROR "))), lines[-1])
    if done.returncode and run_tests(mistake.python, ["--last-failed", *mistake.tests], copy).returncode:
        sys.exit(f"This fails without the mistake too: {evidence}")
    return done.returncode == 1, evidence[:110]


def main() -> int:
    """Run every mistake, and print one line each."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # as tests/lanes.py
    mistakes = read_mistakes(sys.argv[1:])
    if not mistakes:
        sys.exit("no mistake has one of these words")
    num_noticed = 0
    for environment in sorted({one.environment for one in mistakes if not Path(one.python).exists()}):
        print(f"left out: mistakes of which {environment} runs the tests")
    mistakes = [one for one in mistakes if Path(one.python).exists()]
    with tempfile.TemporaryDirectory(prefix="m.") as folder:
        copy = Path(folder) / "rankwise"
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in filter(None, listed.split("\0")):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
        for mistake in mistakes:
            start = time.monotonic()
            apply(mistake, copy)
            try:
                done = run_tests(mistake.python, mistake.tests, copy)
            except subprocess.TimeoutExpired:
                done = None
            shutil.copy2(ROOT / mistake.path, copy / mistake.path)
            is_noticed, evidence = judge(mistake, done, copy)
            num_noticed += is_noticed
            seconds = time.monotonic() - start
            print(
                f"{'noticed' if is_noticed else 'MISSED '} {seconds:4.0f} s  {mistake.what}\n    {evidence}", flush=True
            )
    print(f"{num_noticed} of {len(mistakes)} noticed")
    return 0 if num_noticed >= NOTICED * len(mistakes) else 1


if __name__ == "__main__":
    sys.exit(main())
