# SPDX-License-Identifier: Apache-2.0
"""``import horovod`` and ``import megengine`` where a program has requested rankwise's, and where it has not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.warm import WarmPython

MODULES = {"horovod": "horovod.torch", "megengine": "megengine.distributed"}
"""One that a script imports, for each library."""
LIBRARIES = list(MODULES)


def provide(library: str) -> str:
    """Return the start of a program that requests the alias; the second request does nothing."""
    return f"from rankwise.compat.{library}.alias import provide; provide(); provide()\n"


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_process_that_is_started_afresh_has_them_too(torch_python: WarmPython, tmp_path: Path, method: str) -> None:
    (tmp_path / "program.py").write_text(f"""
import multiprocessing
if __name__ == "__main__":
    {provide("horovod")}
    {provide("megengine")}
import {MODULES["horovod"]} as one
import {MODULES["megengine"]} as other

def tell(pipe):
    pipe.send((one.__name__, other.__name__))

if __name__ == "__main__":
    context = multiprocessing.get_context("{method}")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=tell, args=(theirs,))
    process.start()
    print(ours.recv())
    process.join()
""")
    ended = torch_python.run(["program.py"], tmp_path)
    assert ended.stdout.startswith("('rankwise.compat.horovod', 'rankwise.compat.megengine"), ended.stderr


@pytest.mark.parametrize("library", LIBRARIES)
def test_nothing_happens_unless_it_is_requested(torch_python: WarmPython, tmp_path: Path, library: str) -> None:
    program = f"""
import sys
finders, path = list(sys.meta_path), list(sys.path)
import rankwise.compat.{library}.alias
assert (sys.meta_path, sys.path) == (finders, path)
import {library}
"""
    assert f"ModuleNotFoundError: No module named '{library}'" in torch_python.run(["-c", program], tmp_path).stderr


@pytest.mark.parametrize(("library", "usual"), [("horovod", "hvd"), ("megengine", "mge")])
def test_the_library_itself_is_not_hidden(torch_python: WarmPython, tmp_path: Path, library: str, usual: str) -> None:
    (tmp_path / library).mkdir()
    only_folder = torch_python.run(["-c", provide(library) + f"import {MODULES[library]}"], tmp_path)
    assert only_folder.returncode == 0, "a folder alone is not a package"
    (tmp_path / library / "__init__.py").write_text("")
    for before, found in (("", "it is installed: "), (f"import {library}\n", "it has been imported from ")):
        ended = torch_python.run(["-c", before + provide(library)], tmp_path)
        assert f"{found}{tmp_path}/{library}/__init__.py" in ended.stderr
        assert f"import rankwise.compat.{library} as {usual}" in ended.stderr


@pytest.mark.parametrize(("library", "words"), [("horovod", ["program.py"]), ("megengine", ["-m", "program"])])
def test_a_script_runs_as_under_python(
    torch_python: WarmPython, tmp_path: Path, library: str, words: list[str]
) -> None:
    (tmp_path / "program.py").write_text(
        f"import sys, os, {MODULES[library]} as module\n"
        "print(sys.argv, __name__, os.path.basename(__file__), sys.path[0], module.__name__)\n"
    )
    ended = torch_python.run(["-m", f"rankwise.compat.{library}", *words, "--lr", "-m"], tmp_path)
    argv0 = "program.py" if words[0] == "program.py" else str(tmp_path / "program.py")
    start = f"{[argv0, '--lr', '-m']} __main__ program.py {tmp_path} rankwise.compat.{library}"
    assert ended.stdout.startswith(start), ended.stderr


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_script_that_does_not_exist_is_an_error_without_a_traceback(
    torch_python: WarmPython, tmp_path: Path, library: str
) -> None:
    ended = torch_python.run(["-m", f"rankwise.compat.{library}", "nowhere.py"], tmp_path)
    assert ended.returncode == 2
    assert ended.stderr.startswith("ConfigurationError: Script 'nowhere.py' does not exist.\n")
