# SPDX-License-Identifier: Apache-2.0
"""Importing rankwise changes nothing, and brings little beyond torch."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from typing import Any

import pytest

# Slow to import, or with effects of their own, and needed by some users only.
LATER = (
    "IPython",
    "cloudpickle",
    "matplotlib",
    "monai",
    "multiprocessing.forkserver",
    "multiprocessing.popen_spawn_posix",
    "ray",
    "rankwise.cli",
    "rankwise.launch.agent.agent",
    "rankwise.launch.agent.output",
    "rankwise.launch.fork_server.fork_server",
    "rankwise.launch.start",
    "rankwise.launch.fork_server.worker",
    "rankwise.testing",
    "scipy",
    "sklearn",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.checkpoint",
    "torch.distributed.elastic",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.rpc",
    "torch.distributed.tensor",
    "tqdm",
)
# shard and tensor_parallel are left out: they stand on torch's FSDP2 and DTensor, and import them when first used.
PROGRAM = """
import json, logging, os, signal, sys, threading, warnings
import torch

def state():
    return {
        "variables": dict(os.environ),
        "signals": [str(signal.getsignal(one)) for one in sorted(signal.valid_signals())],
        "root handlers": [str(handler) for handler in logging.getLogger().handlers],
        "own handlers": [str(handler) for handler in logging.getLogger("rankwise").handlers],
        "log level": logging.getLogger().level,
        "torch.compile": id(torch.compile),
        "print": id(print),
        "hooks": [id(sys.excepthook), id(threading.excepthook), id(sys.displayhook)],
        "warning filters": [str(one) for one in warnings.filters],
        "threads of torch": torch.get_num_threads(),
        "default dtype": str(torch.get_default_dtype()),
        "threads": [thread.name for thread in threading.enumerate()],
        "threads of the process": len(os.listdir("/proc/self/task")),
        "children": open(f"/proc/self/task/{os.getpid()}/children").read(),
        "random state": torch.random.get_rng_state().tolist(),
        "CUDA is initialized": torch.cuda.is_initialized(),
        "process group": torch.distributed.is_initialized(),
        "path": sys.path,
    }

before, modules = state(), set(sys.modules)
import rankwise
for name in rankwise.__all__:
    if name not in ("plan_of", "shard", "tensor_parallel"):
        getattr(rankwise, name)
json.dump({"before": before, "after": state(), "new": sorted(set(sys.modules) - modules)},
sys.stdout)
"""


@cache
def around_the_import() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    states: dict[str, Any] = json.loads(done.stdout)
    return states


def test_importing_changes_nothing() -> None:
    states = around_the_import()
    before, after = states["before"], states["after"]
    assert {name: after[name] for name in after if before[name] != after[name]} == {}
    assert after["CUDA is initialized"] is False


@pytest.mark.parametrize("later", LATER)
def test_importing_leaves_for_later_what_it_can(later: str) -> None:
    new = around_the_import()["new"]
    assert [name for name in new if f"{name}.".startswith(f"{later}.")] == []


def test_the_new_modules_are_seen_at_all() -> None:
    assert "rankwise.world" in around_the_import()["new"]


def test_the_pure_modules_load_where_there_is_no_torch() -> None:
    """They are read by tools that must answer at once; the package itself stands aside for this."""
    program = (
        "import pathlib, sys, types\n"
        "sys.modules['torch'] = None\n"
        "package = types.ModuleType('rankwise')\n"
        "package.__path__ = [sys.argv[1]]\n"
        "sys.modules['rankwise'] = package\n"
        "import rankwise.errors, rankwise.world, rankwise.world.environments\n"
        "import rankwise.data.epoch_order, rankwise.data.shards, rankwise.checkpoint.manifest\n"
    )
    import rankwise

    (folder,) = rankwise.__path__
    subprocess.run([sys.executable, "-c", program, folder], check=True)
