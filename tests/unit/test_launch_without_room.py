# SPDX-License-Identifier: Apache-2.0
"""A machine that allows the launcher no further process.

``os.fork`` is replaced: limits on processes do not bind root, which the tests run as.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = f"""
import os, sys
def fork():
    raise BlockingIOError({errno.EAGAIN}, os.strerror({errno.EAGAIN}))
os.fork = fork
from rankwise.cli import main
sys.exit(main(["run", "-n", "2", "train.py"]))
"""


def test_it_is_reported_and_no_folder_remains(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    folders = tmp_path / "tmp"
    folders.mkdir()
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(folders)},
        capture_output=True,
        text=True,
        timeout=80,
        check=False,
    )
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.startswith("LaunchError: This machine does not allow the launcher to start another process.\n")
    assert os.strerror(errno.EAGAIN) in ended.stderr
    assert not list(folders.iterdir())
