# SPDX-License-Identifier: Apache-2.0
"""A rank that exits: whatever its script has opened, registered or loaded is closed as Python and C close it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Command

SCRIPT = r"""
import atexit, ctypes, gc, io, os, sys, tempfile, threading, weakref
import beside

rank = os.environ["RANK"]
unclosed = open(f"unclosed-{rank}.txt", "w")
unclosed.write("written")
sys.stdout = open(f"stdout-{rank}.txt", "w")
print("printed")


class Closes:
    def __init__(self, name):
        self.name = name

    def __del__(self):
        os.close(os.open(self.name, os.O_CREAT | os.O_WRONLY))


kept = Closes(f"deleted-{rank}")
beside.kept = Closes(f"deleted-beside-{rank}")
cycle = Closes(f"deleted-cycle-{rank}")
cycle.itself = cycle
atexit.register(lambda: Closes(f"atexit-{rank}"))
temporary = tempfile.TemporaryDirectory()
open(f"temporary-{rank}.txt", "w").write(temporary.name)
started = threading.Thread(target=lambda: (threading.main_thread().join(), Closes(f"thread-{rank}")))
started.start()
libc = ctypes.CDLL(None)
libc.printf(b"from C on rank %d\n", int(rank))
library = ctypes.CDLL(os.path.abspath("library.so"))
library.remember(os.path.abspath(f"library-{rank}").encode())
import torch
import rankwise as rw
if JOINS:
    world = rw.join()
    rw.all_reduce(torch.ones(2))
sys.exit(CODE)
"""
LIBRARY = r"""
#include <cstdio>
#include <string>
static std::string path;
struct Closes { ~Closes() { if (FILE* f = fopen(path.c_str(), "w")) fclose(f); } };
static Closes closes;
extern "C" void remember(const char* where) { path = where; }
"""


@pytest.mark.parametrize(("joins", "code"), [(True, 0), (False, 7)])
def test_everything_of_the_script_is_closed(command: Command, joins: bool, code: int) -> None:
    compiler = shutil.which("g++")
    assert compiler is not None, "apt install g++"
    source = command.write("library.cpp", LIBRARY)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", command.folder / "library.so", source], check=True)
    command.write("beside.py", "")
    command.write("train.py", SCRIPT.replace("JOINS", str(joins)).replace("CODE", str(code)))
    done = command.rankwise("run", "-n", "2", "train.py")
    assert done.returncode == code, done.stderr
    for rank in range(2):
        assert (command.folder / f"unclosed-{rank}.txt").read_text() == "written"
        assert (command.folder / f"stdout-{rank}.txt").read_text() == "printed\n"
        for name in ("deleted", "deleted-beside", "deleted-cycle", "atexit", "thread", "library"):
            assert (command.folder / f"{name}-{rank}").exists(), name
        temporary = (command.folder / f"temporary-{rank}.txt").read_text()
        assert temporary
        assert not Path(temporary).exists()
    assert sorted(re.findall(r"from C on rank (\d)", done.stdout)) == ["0", "1"]
