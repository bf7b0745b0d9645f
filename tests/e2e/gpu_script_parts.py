# SPDX-License-Identifier: Apache-2.0
"""Parts of ``tests/gpu/run.py`` that do what parts should not: for the tests of that script."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

from setting import Check, NotPossible

if TYPE_CHECKING:
    from setting import Setting


def _hang(setting: Setting) -> str:
    subprocess.run(["sleep", "600"], start_new_session=True, check=True)
    return ""


def _fail(setting: Setting) -> str:
    raise ValueError("one | two\nthree")


def _refuse(setting: Setting) -> str:
    raise NotPossible("needs CUDA")


HANGS = [Check("hangs", _hang)]
FAILS = [Check("fails", _fail), Check("is not possible", _refuse), Check("passes", lambda setting: setting.device)]
