# SPDX-License-Identifier: Apache-2.0
"""Scripts of other frameworks, started by torchrun and by rankwise, in processes that a test marks."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
FRAMEWORKS = ("accelerate", "ignite", "lightning", "monai", "tensorflow", "timm", "transformers")
MOST_SECONDS = 80
"""A command may take, at most."""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
RANKWISE = ("-m", "rankwise", "run", "--device", "cpu", "-n")


@pytest.fixture(scope="session", autouse=True)
def _frameworks_are_there() -> None:
    missing = [name for name in FRAMEWORKS if importlib.util.find_spec(name) is None]
    if missing:
        pytest.fail(
            f"{', '.join(missing)}: not installed here; run `make frameworks`, which has them in .venv-frameworks"
        )


class Launcher:
    """Starts scripts on ranks, in a folder of the test's own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def words(self, *words: str) -> list[str]:
        """Return the command that starts Python with ``words``."""
        return [sys.executable, *words]

    def environment(self) -> dict[str, str]:
        """Return this process's environment, with one thread per rank and nothing asked of the network."""
        offline = {"HF_HUB_OFFLINE": "1", "NO_ALBUMENTATIONS_UPDATE": "1"}
        # What is given may be where a changed copy of rankwise lies.
        path = os.pathsep.join(filter(None, [str(HERE / "on_path"), os.environ.get("PYTHONPATH")]))
        return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **offline}

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run Python with ``words`` to its end."""
        return subprocess.run(
            self.words(*words),
            cwd=self.folder,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=MOST_SECONDS,
        )

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start Python with ``words`` in a session of its own, as a terminal does."""
        return subprocess.Popen(
            self.words(*words),
            cwd=self.folder,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def train(self, launcher: tuple[str, ...], num_ranks: int, script: str, *arguments: str) -> Trained:
        """Run a script of ``scripts`` to its end; its first argument is a new folder."""
        folder = self.folder / f"{launcher[1]}-{num_ranks}"
        folder.mkdir()
        path = str(HERE / "scripts" / f"{script}.py")
        done = self.run(*launcher, str(num_ranks), path, str(folder), *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return Trained(folder, done.stderr)


class Trained:
    """What the ranks of a script left in its folder."""

    def __init__(self, folder: Path, stderr: str) -> None:
        self.stderr = stderr
        self.folder = folder
        files = sorted(folder.glob("rank*.pt"))
        self.ranks: list[dict[str, Any]] = [torch.load(path) for path in files]
        self.times_written = len((folder / "main").read_text().splitlines())
        """How many ranks took themselves for the main one."""


@pytest.fixture
def launcher(tmp_path: Path) -> Launcher:
    """Both launchers, in an empty folder."""
    return Launcher(tmp_path)
