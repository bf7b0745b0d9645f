# SPDX-License-Identifier: Apache-2.0
"""``rankwise run`` as users call it: what ranks see, and errors before anything starts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.e2e.conftest import Command

FACTS = """
    '''doc'''
    import json, multiprocessing, os, sys, threading

    class Point:
        pass

    main = sys.modules["__main__"]
    facts = dict(
        argv=sys.argv, name=__name__, file=__file__, doc=__doc__, package=__package__,
        cwd=os.getcwd(), annotations=__annotations__,
        spec=__spec__ and __spec__.name, loader=type(__loader__).__name__, cached=__cached__,
        first_path=sys.path[0], num_paths=len(sys.path),
        is_main=main.__dict__ is globals(), builtins=type(__builtins__).__name__,
        kind=Point.__module__, process=multiprocessing.current_process().name,
        parent=multiprocessing.parent_process(),
        start_method=multiprocessing.get_start_method(allow_none=True),
        daemon=multiprocessing.current_process().daemon, thread=threading.current_thread().name,
        is_main_thread=threading.current_thread() is threading.main_thread(),
    )
    if __name__ == "__main__":
        with open(f"facts-{os.environ.get('RANK', 'python')}.json", "w") as file:
            json.dump(facts, file)
"""


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("words", [["sub/facts.py", "--", "a", "-n", "7", "--log-dir=x"], ["-m", "sub.facts", "-m"]])
def test_a_script_sees_what_python_gives_it(command: Command, num_ranks: int, words: list[str]) -> None:
    command.write("sub/facts.py", FACTS)
    subprocess.run([sys.executable, *words], cwd=command.folder, env=command.environment(), check=True)
    ended = command.run("-n", str(num_ranks), *words)
    assert ended.returncode == 0, ended.stderr
    expected = json.loads((command.folder / "facts-python.json").read_text())
    for rank in range(num_ranks):
        assert json.loads((command.folder / f"facts-{rank}.json").read_text()) == expected


def test_a_package_runs_by_its_main_module(command: Command) -> None:
    command.write("pack/__init__.py", "")
    command.write(
        "pack/__main__.py",
        "import sys; from . import part; print(part.x, __package__, sys.argv[1:])",
    )
    command.write("pack/part.py", "x = 5")
    ended = command.run("-m", "pack", "one")
    assert ended.stdout == "5 pack ['one']\n", ended.stderr


def test_ranks_get_the_variables_and_a_working_group(command: Command) -> None:
    command.write(
        "train.py",
        """
        import json, os, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.tensor([dist.get_rank() + 1.0])
        dist.all_reduce(total)
        names = (
            "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE "
            "MASTER_ADDR RANKWISE_ATTEMPT"
        ).split()
        apart = os.environ["RANKWISE_STORE"] != f"127.0.0.1:{os.environ['MASTER_PORT']}"
        facts = [total.item(), apart, len(os.environ["RANKWISE_RUN_ID"])]
        print(json.dumps(facts + [os.environ[name] for name in names]))
        dist.destroy_process_group()
        """,
    )
    ended = command.run("-n", "3", "train.py", env={"TORCHELASTIC_RUN_ID": "outer"})
    assert ended.returncode == 0, ended.stderr
    rows = sorted(json.loads(line) for line in ended.stdout.splitlines())
    assert rows == [[6.0, True, 16, str(rank), "3", str(rank), "3", "0", "1", "127.0.0.1", "0"] for rank in range(3)]
    first, last = ended.stderr.splitlines()
    assert first == f"[rankwise] 3 ranks on this machine, {_threads(3)}"
    assert re.fullmatch(r"\[rankwise\] 3 ranks finished in \d+ s", last)


def test_the_default_without_gpus_is_one_rank(command: Command) -> None:
    command.write("train.py", "import os; print(os.environ['WORLD_SIZE'])")
    ended = command.run("--device", "cpu", "train.py")
    assert ended.stdout == "1\n", ended.stderr


def test_a_joined_world_names_its_launcher(command: Command) -> None:
    command.write(
        "train.py",
        """
        import torch, rankwise as rw
        with rw.join() as world:
            total = rw.all_reduce(torch.ones(2))
            print(world.rank, world.world_size, world.source, total.tolist())
        """,
    )
    ended = command.run("-n", "2", "--device", "cpu", "train.py")
    assert sorted(ended.stdout.splitlines()) == [f"{rank} 2 rankwise [2.0, 2.0]" for rank in (0, 1)], ended.stderr
    assert ended.returncode == 0


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_classes_of_the_script_reach_loader_workers(command: Command, method: str) -> None:
    command.write(
        "train.py",
        """
        import pickle, sys, torch
        from torch.utils.data import DataLoader, Dataset

        class Squares(Dataset):
            def __len__(self):
                return 6
            def __getitem__(self, i):
                return i * i

        if __name__ == "__main__":
            assert isinstance(pickle.loads(pickle.dumps(Squares())), Squares)
            method = sys.argv[1]
            loader = DataLoader(Squares(), 3, num_workers=2, multiprocessing_context=method)
            print([batch.tolist() for batch in loader])
        """,
    )
    ended = command.run("-n", "2", "train.py", method)
    assert ended.stdout.splitlines() == ["[[0, 1, 4], [9, 16, 25]]"] * 2, ended.stderr
    assert ended.returncode == 0


def test_the_end_of_a_rank_is_the_end_of_a_python_program(command: Command) -> None:
    command.write(
        "train.py",
        """
        import atexit, os, threading
        rank = os.environ["RANK"]
        left_open = open(f"open-{rank}", "w")
        left_open.write("all of it")
        atexit.register(print, "atexit", rank)
        threading.Timer(0.05, print, ["thread", rank]).start()
        """,
    )
    ended = command.run("-n", "2", "train.py")
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == ["atexit 0", "atexit 1", "thread 0", "thread 1"]
    assert [(command.folder / f"open-{rank}").read_text() for rank in (0, 1)] == ["all of it"] * 2


def test_forked_ranks_draw_different_random_numbers(command: Command) -> None:
    command.write("train.py", "import random, numpy; print(random.random(), numpy.random.rand())")
    lines = command.run("-n", "3", "train.py").stdout.split()
    assert len(set(lines)) == 6


@pytest.mark.parametrize("chosen", [None, "3", "2,1"])
def test_threads_are_shared_out_unless_the_user_chose(command: Command, chosen: str | None) -> None:
    command.write(
        "train.py",
        """
        import os, torch
        e = os.environ
        print(torch.get_num_threads(), e["OMP_NUM_THREADS"], e["MKL_NUM_THREADS"])
        """,
    )
    ended = command.run("-n", "2", "train.py", env={} if chosen is None else {"OMP_NUM_THREADS": chosen})
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    threads = share if chosen is None else int(chosen.split(",")[0])
    assert ended.stdout.splitlines() == [f"{threads} {chosen or threads} {threads}"] * 2, ended.stderr


# -- what was asked cannot be done -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["nowhere.py"], "Script 'nowhere.py' does not exist"),
        (["godo.py"], "\n  do        did you mean good.py?\n"),
        (["bare/__inti__"], "\n  do        did you mean bare/__init__.py?\n"),
        (["--hosts", "good.py"], "'good.py' is a script, not a host; write --hosts gpu-01,gpu-02 good.py"),
        (["folder"], "is a folder"),
        (["-m", "nowhere"], "Module 'nowhere' was not found"),
        (["-m", "good.part"], "Module 'good.part' was not found"),
        (["-m", "good.py"], "Module 'good.py' was not found"),
        (["-m", "bare"], "without a __main__.py"),
        (["bad.py"], "SyntaxError: invalid syntax"),
        (["-m", "bad"], "SyntaxError: invalid syntax"),
        (["-n", "0", "good.py"], "The number of ranks must be >= 1, got 0"),
        (["-n", "-2", "good.py"], "The number of ranks must be >= 1, got -2"),
        (["-n", "two", "good.py"], "'two' is not a number"),
        (["--max-restarts", "-1", "good.py"], "max_restarts must be >= 0, got -1"),
        (["--log-dir", "good.py/logs", "good.py"], "cannot be written to"),
        ([], "the following arguments are required"),
    ],
)
def test_a_mistake_is_reported_before_anything_starts(command: Command, words: list[str], text: str) -> None:
    command.write("good.py", "print('started')")
    command.write("bad.py", "print('started')\nx = = 1\n")
    command.write("bare/__init__.py", "print('started')")
    (command.folder / "folder").mkdir()
    ended = command.run(*words)
    assert text in ended.stderr
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "Traceback" not in ended.stderr


def _threads(num_ranks: int) -> str:
    threads = max(1, len(os.sched_getaffinity(0)) // num_ranks)
    return f"{threads} CPU {'thread' if threads == 1 else 'threads'} each"


def test_a_stop_asked_for_before_the_script_has_joined_is_heeded(command: Command) -> None:
    command.write(
        "train.py",
        """
        import os, signal
        os.kill(os.getpid(), signal.SIGUSR2)
        import torch, rankwise as rw
        with rw.join():
            checkpoints, model = rw.Checkpointer("saved"), torch.nn.Linear(1, 1)
            for step in range(3):
                checkpoints.stop_if_asked(model=model)
        """,
    )
    ended = command.run("-n", "1", "train.py")
    assert ended.returncode == 75, ended.stderr
    assert (command.folder / "saved" / "checkpoint-000001").is_dir()
