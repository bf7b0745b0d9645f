# SPDX-License-Identifier: Apache-2.0
"""Runs a function on ranks that have the stand-in device of tests/standin. This process does not get it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankwise.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.testing import RankResult

FOLDER = str(Path(__file__).parents[1] / "standin")
NUM_DEVICES = 4


class WithStandin:
    """A function that gives the process the device when it is unpickled there, before the rank joins."""

    def __init__(self, fn: Callable[..., Any], *, strict: bool = False) -> None:
        self._fn = fn
        self._strict = strict

    def __setstate__(self, state: dict[str, Any]) -> None:
        sys.path.insert(0, FOLDER)
        import standin

        standin.load(strict=state["_strict"])
        self.__dict__.update(state)

    def __call__(self, *args: Any) -> Any:
        return self._fn(*args)


def build_standin(*, strict: bool = False) -> None:
    """Compile the device, which is not to happen within a rank: ranks would do so side by side.

    With ``strict``, compile its backend, too.
    """
    sources = importlib.util.spec_from_file_location("standin", Path(FOLDER, "standin", "__init__.py"))
    assert sources is not None
    assert sources.loader is not None
    standin = importlib.util.module_from_spec(sources)
    sources.loader.exec_module(standin)
    standin.built()
    if strict:
        standin.built("strict")


def results_on_standin(
    fn: Callable[..., Any],
    world_size: int,
    *args: object,
    exchange: str = "auto",
    backend: str = "gloo",
    **limits: float,
) -> list[RankResult]:
    """Return the outcome of ``fn(world, *args)`` on each rank, with a device of its own.

    ``backend``: ``gloo``, or ``strict``: one for the device, as unforgiving as NCCL. ``limits`` are those of
    :func:`rankwise.testing.run_ranks`.
    """
    given = WithStandin(fn, strict=backend == "strict")
    return run_ranks(given, world_size, *args, exchange=exchange, device=None, **limits)


def on_standin(
    fn: Callable[..., Any], world_size: int, *args: object, exchange: str = "auto", backend: str = "gloo"
) -> list[Any]:
    """Return what ``fn(world, *args)`` comes to on each rank. See :func:`results_on_standin`."""
    results = results_on_standin(fn, world_size, *args, exchange=exchange, backend=backend)
    return [result.get() for result in results]


def python_with_standin(
    *words: str, strict: bool = False, folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run Python, in ``folder``, where ``import torch`` finds the device, as it finds that of an installed package."""
    command = [sys.executable, *words]
    env = os.environ | {"PYTHONPATH": FOLDER, "PYTHONWARNINGS": "error"}
    if strict:
        env["STANDIN_BACKEND"] = "strict"
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=80, cwd=folder)
