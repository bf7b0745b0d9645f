# SPDX-License-Identifier: Apache-2.0
"""``import megengine`` in programs that have requested the alias, and in others."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

    from tests.warm import WarmPython

PROVIDE = "from rankwise.compat.megengine.alias import provide; provide(); provide()\n"


def run(python: WarmPython, program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own, since the alias lasts as long as the process."""
    (folder / "program.py").write_text(program)
    return python.run(["program.py"], folder)


def test_every_way_of_importing_leads_to_the_same_modules(torch_python: WarmPython, tmp_path: Path) -> None:
    program = """
import megengine as mge
import megengine
import megengine.autodiff as ad
import megengine.distributed as dist
import megengine.functional.distributed as FD
import megengine.optimizer as optim
from megengine import functional as F, module as M
from megengine.autodiff import GradManager
from megengine.data import DataLoader, RandomSampler
from megengine.data.collator import Collator
from megengine.data.dataloader import DataLoader as loader
from megengine.data.dataset import ArrayDataset
from megengine.data.sampler import RandomSampler as sampler
from megengine.data.transform import Transform
from megengine.distributed.helper import get_device_count_by_fork
from megengine.functional.distributed import remote_recv
from megengine.tensor import Parameter
import rankwise.compat.megengine as ours

assert mge is megengine is ours and mge.distributed is dist and mge.optimizer is optim and mge.module is M
assert dist.functional.remote_recv is remote_recv is FD.remote_recv is F.distributed.remote_recv
assert loader is DataLoader and sampler is RandomSampler and mge.data.Collator is Collator
assert mge.data.dataset.ArrayDataset is ArrayDataset and mge.data.transform.Transform is Transform
assert ad.GradManager is GradManager and mge.Parameter is Parameter and F.nn.cross_entropy is F.loss.cross_entropy
assert mge.__spec__.name == mge.__name__ == "rankwise.compat.megengine"
print(dist.get_rank(), dist.get_world_size(), mge.tensor([1.0]).tolist())
"""
    ended = run(torch_python, PROVIDE + program, tmp_path)
    assert (ended.returncode, ended.stdout) == (0, "0 1 [1.0]\n"), ended.stderr


def test_a_missing_name_raises_with_the_available_ones(torch_python: WarmPython, tmp_path: Path) -> None:
    names = {
        "megengine.data.dataset.vision": "torchvision.datasets",
        "megengine.data.transform.vision": "torchvision.transforms",
        "megengine.jit": "torch.compile",
        "megengine.jit.tracing": "torch.compile",
        "megengine.utils": "it has megengine.autodiff",
    }
    program = f"""
import importlib
for name in {[*names]}:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        print(error)
"""
    ended = run(torch_python, PROVIDE + program, tmp_path)
    lines = ended.stdout.splitlines()
    for (name, instead), line in zip(names.items(), lines, strict=True):
        assert f"no {name.removesuffix('.tracing')}" in line
        assert instead in line
