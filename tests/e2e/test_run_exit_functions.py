# SPDX-License-Identifier: Apache-2.0
"""Functions that ``atexit`` calls in ranks although they were registered before the launcher, as sitecustomize does."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.e2e.conftest import Command

CUSTOM = """
import atexit

def last():
    import numpy, torch.nn
    print("last", float(numpy.ones(2).sum()), float(torch.ones(3).sum()))

atexit.register(last)
"""


def test_a_function_registered_before_the_launcher_may_import_numpy(command: Command) -> None:
    folder = command.write("site/sitecustomize.py", CUSTOM).parent
    command.write("train.py", "print('trained')")
    ended = command.run("-n", "2", "train.py", env={"PYTHONPATH": str(folder)})
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines().count("trained") == 2
    assert ended.stdout.splitlines().count("last 2.0 3.0") >= 2
    assert "Traceback" not in ended.stderr
