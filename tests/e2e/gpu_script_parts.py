# SPDX-License-Identifier: Apache-2.0
"""Parts of ``tests/gpu/run.py`` that do what parts should not: for the tests of that script."""

from __future__ import annotations

from typing import TYPE_CHECKING

from setting import Check, NotPossible

if TYPE_CHECKING:
    from setting import Setting


def _fail(setting: Setting) -> str:
    raise ValueError("one | two\nthree")


def _refuse(setting: Setting) -> str:
    raise NotPossible("needs CUDA")


FAILS = [Check("fails", _fail), Check("is not possible", _refuse), Check("passes", lambda setting: setting.device)]
