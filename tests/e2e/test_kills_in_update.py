# SPDX-License-Identifier: Apache-2.0
"""A few of the kills of ``make kills`` that fall into the update which the ranks of a host divide."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

KILLS = Path(__file__).parents[1] / "faults" / "kills_in_update.py"


def test_kills_at_random_moments_of_the_update_lose_nothing() -> None:
    words = ["--kills", "4", "--seed", "7", "--kinds", "AdamW"]
    done = subprocess.run([sys.executable, KILLS, *words], check=False, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "AdamW: bit-equal at the end" in done.stdout
    assert done.stdout.count("ok ") == 5, done.stdout
    assert " 0 wrong" in done.stdout
