# SPDX-License-Identifier: Apache-2.0
"""``import horovod.torch`` in programs that have requested the alias, and in others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import rankwise
from rankwise.compat.horovod.alias import ON_PATH

if TYPE_CHECKING:
    from tests.warm import WarmPython

PROVIDE = "from rankwise.compat.horovod.alias import provide; provide(); provide()\n"


def run(python: WarmPython, program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own, since the alias lasts as long as the process."""
    (folder / "program.py").write_text(program)
    return python.run(["program.py"], folder)


def test_every_way_of_importing_leads_to_the_same_modules(torch_python: WarmPython, tmp_path: Path) -> None:
    program = """
import importlib, sys
import horovod
import horovod.torch as hvd
import horovod.torch.elastic
import horovod.torch.mpi_ops as operations
import horovod.torch.elastic.sampler as sampler
from horovod.torch import elastic, DistributedOptimizer
from horovod.torch.elastic.state import TorchState, get_handler_registry
from horovod.torch.compression import Compression
from horovod.torch.functions import broadcast_object
from horovod.torch.optimizer import DistributedOptimizer as optimizer
from horovod.common.process_sets import ProcessSet
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from horovod.common.elastic import State, ObjectState, run, run_fn
from horovod.common import util, process_sets
from horovod.common.util import env, split_list
from horovod.runner import run as launched
import rankwise.compat.horovod as ours

assert hvd is horovod.torch is operations is ours and horovod.__version__ == "0.28.1"
assert elastic is horovod.torch.elastic is ours.elastic and sampler.ElasticSampler is elastic.ElasticSampler
assert DistributedOptimizer is optimizer is ours.DistributedOptimizer
assert TorchState is elastic.TorchState and run is elastic.run and Compression is hvd.Compression
assert HorovodInternalError is hvd.HorovodInternalError
assert hvd.__spec__.name == hvd.__name__ == "rankwise.compat.horovod"
own = [name for name in sys.modules if name.startswith("horovod.") and "rankwise" not in sys.modules[name].__name__]
assert sorted(own) == ["horovod.common", "horovod.runner"], own
assert launched is horovod.run is hvd.run and run_fn is hvd.elastic.run_fn
assert hvd.mpi_ops.Sum is hvd.functions.Sum is process_sets.Sum is hvd.Sum and util.env is env
hvd.init()
print(hvd.rank(), hvd.size())
"""
    ended = run(torch_python, PROVIDE + program, tmp_path)
    assert (ended.returncode, ended.stdout) == (0, "0 1\n"), ended.stderr


def test_one_line_is_enough(torch_python: WarmPython, tmp_path: Path) -> None:
    program = """
import rankwise.compat.horovod.as_horovod
import rankwise.compat.horovod.as_horovod
import horovod
import horovod.torch as hvd
hvd.init()
print(horovod.__version__, hvd.__name__, hvd.size())
"""
    ended = run(torch_python, program, tmp_path)
    assert (ended.returncode, ended.stdout) == (0, "0.28.1 rankwise.compat.horovod 1\n"), ended.stderr


def test_a_part_of_horovod_torch_is_found_with_the_one_changed_line_too(
    torch_python: WarmPython, tmp_path: Path
) -> None:
    program = """
import sys
import rankwise.compat.horovod as hvd
assert hvd.mpi_ops.Average is hvd.Average and hvd.functions.broadcast_object is hvd.broadcast_object
assert "horovod" not in sys.modules
"""
    ended = run(torch_python, program, tmp_path)
    assert ended.returncode == 0, ended.stderr


INSTEAD = {
    "horovod.tensorflow": "arrays of other frameworks",
    "horovod.tensorflow.keras": "arrays of other frameworks",
    "horovod.keras": "arrays of other frameworks",
    "horovod.mxnet": "arrays of other frameworks",
    "horovod.spark.torch": "rankwise run --hosts",
    "horovod.ray": "rankwise run --hosts",
    "horovod.runner.launch": "rankwise horovodrun",
    "horovod.run.runner": "horovod.run()",
    "horovod.torch.queue": "it has horovod.torch",
}


def test_a_missing_name_raises_with_the_available_ones(torch_python: WarmPython, tmp_path: Path) -> None:
    program = f"""
import importlib, json
told = {{}}
for name in {list(INSTEAD)}:
    try:
        importlib.import_module(name)
    except ImportError as error:
        told[name] = str(error)
print(json.dumps(told))
"""
    ended = run(torch_python, PROVIDE + program, tmp_path)
    told = json.loads(ended.stdout)
    assert list(told) == list(INSTEAD), ended.stderr
    for name, instead in INSTEAD.items():
        missing = name.removesuffix(".keras").removesuffix("spark.torch").removesuffix(".runner")
        assert f"has no {missing}" in told[name]
        assert instead in told[name]


def test_a_real_horovod_is_not_hidden_by_the_path_that_commands_are_given(tmp_path: Path) -> None:
    (tmp_path / "site" / "horovod").mkdir(parents=True)
    (tmp_path / "site" / "horovod" / "__init__.py").write_text("")
    (tmp_path / "program.py").write_text("import horovod.torch")
    path = os.pathsep.join([ON_PATH, str(tmp_path / "site"), str(Path(rankwise.__file__).parents[1])])
    ended = subprocess.run(
        [sys.executable, "program.py"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        timeout=80,
    )
    assert f"it is installed: {tmp_path}/site/horovod/__init__.py" in ended.stderr
    without = subprocess.run(
        [sys.executable, "-S", "program.py"],
        env={**os.environ, "PYTHONPATH": ON_PATH},
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        timeout=80,
    )
    assert "this Python lacks rankwise: install it for" in without.stderr
