# SPDX-License-Identifier: Apache-2.0
"""The part for machines with several GPUs: the tests of this folder, with a GPU per rank."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from setting import Check, NotPossible

if TYPE_CHECKING:
    from setting import Setting


def _tests(setting: Setting) -> str:
    setting.needs_cuda()
    if setting.num_devices() == 1:
        raise NotPossible("needs two GPUs")
    root = Path(__file__).parents[2]
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu"]
    done = subprocess.run([sys.executable, *words], cwd=root, capture_output=True, text=True, check=False)
    last = done.stdout.rstrip().rpartition("\n")[2]
    assert done.returncode == 0, f"{last}\n{done.stdout[-10000:]}"
    return last


SEVERAL = [Check("tests/gpu", _tests)]
