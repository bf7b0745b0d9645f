# SPDX-License-Identifier: Apache-2.0
"""``import megengine`` where a program has asked for rankwise to stand in, and where it has not."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

PROVIDE = "from rankwise.compat.megengine.alias import provide; provide(); provide()\n"


def run(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own, since the alias lasts as long as the process."""
    path = folder / "program.py"
    path.write_text(program)
    return subprocess.run(
        [sys.executable, "-W", "error", str(path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
    )


def test_every_way_of_importing_leads_to_the_same_modules(tmp_path: Path) -> None:
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
    ended = run(PROVIDE + program, tmp_path)
    assert (ended.returncode, ended.stdout) == (0, "0 1 [1.0]\n"), ended.stderr


def test_a_process_that_is_started_afresh_has_it_too(tmp_path: Path) -> None:
    program = """
import multiprocessing
if __name__ == "__main__":
    from rankwise.compat.megengine.alias import provide
    provide()
import megengine.distributed as dist

def tell(pipe):
    pipe.send(dist.__name__)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=tell, args=(theirs,))
    process.start()
    print(ours.recv())
    process.join()
"""
    ended = run(program, tmp_path)
    assert ended.stdout == "rankwise.compat.megengine.distributed\n", ended.stderr


def test_nothing_happens_unless_it_is_asked_for(tmp_path: Path) -> None:
    program = """
import sys
finders, path = list(sys.meta_path), list(sys.path)
import rankwise.compat.megengine.distributed
assert (sys.meta_path, sys.path) == (finders, path)
import megengine
"""
    assert "ModuleNotFoundError: No module named 'megengine'" in run(program, tmp_path).stderr


def test_what_is_not_offered_names_what_is(tmp_path: Path) -> None:
    names = {
        "megengine.data.dataset.vision": "torchvision.datasets",
        "megengine.data.transform.vision": "torchvision.transforms",
        "megengine.jit": "torch.compile",
        "megengine.jit.tracing": "torch.compile",
        "megengine.utils": "it has autodiff",
    }
    program = f"""
import importlib
for name in {[*names]}:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        print(error)
"""
    ended = run(PROVIDE + program, tmp_path)
    lines = ended.stdout.splitlines()
    for (name, instead), line in zip(names.items(), lines, strict=True):
        assert f"no {name.removesuffix('.tracing')}" in line
        assert instead in line


def test_a_real_megengine_is_not_hidden(tmp_path: Path) -> None:
    (tmp_path / "megengine").mkdir()
    assert run(PROVIDE + "import megengine.distributed", tmp_path).returncode == 0, "a folder alone is not a package"
    (tmp_path / "megengine" / "__init__.py").write_text("")
    for before, found in (("", "it is installed: "), ("import megengine\n", "it has been imported from ")):
        ended = run(before + PROVIDE, tmp_path)
        assert f"{found}{tmp_path}/megengine/__init__.py" in ended.stderr
        assert "import rankwise.compat.megengine as mge" in ended.stderr


@pytest.mark.parametrize("words", [["program.py"], ["-m", "program"]])
def test_a_script_runs_as_under_python(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "program.py").write_text(
        "import sys, os, megengine as mge\n"
        "print(sys.argv[1:], __name__, os.path.basename(__file__), sys.path[0], mge.__name__)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-m", "rankwise.compat.megengine", *words, "--lr", "-m"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert ended.stdout == f"['--lr', '-m'] __main__ program.py {tmp_path} rankwise.compat.megengine\n", ended.stderr


def test_a_script_that_does_not_exist_is_an_error_in_words(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "rankwise.compat.megengine", "nowhere.py"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert ended.returncode == 2
    assert ended.stderr.startswith("ConfigurationError: There is no script 'nowhere.py'.\n")
