# SPDX-License-Identifier: Apache-2.0
"""A part of ``tests/gpu/run.py`` that hangs, with a child outside its process group, before it imports torch."""

from __future__ import annotations

import subprocess

subprocess.run(["sleep", "600"], start_new_session=True, check=True)
