# SPDX-License-Identifier: Apache-2.0
"""``dist.launcher`` as scripts of MegEngine's users have it, and processes that join by themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rankwise.store.wire import listen

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Command

    from tests.warm import Started


@pytest.fixture
def port() -> int:
    """A port that was free a moment ago."""
    with listen("127.0.0.1", 0) as listener:
        return listener.getsockname()[1]


SECRET = {"RANKWISE_SECRET": "of these tests"}


def _start(command: Command, script: Path, *words: str) -> Started:
    return command.start_python(str(script), *words, env=SECRET)


def _run(command: Command, script: Path, *words: str) -> tuple[int, str, str]:
    process = _start(command, script, *words)
    out, said = process.communicate(timeout=80)
    return process.returncode, out, said


MODULE = """
import torch
import rankwise.compat.megengine.distributed as dist
from rankwise.compat.megengine.functional.distributed import all_reduce_sum

def add(number, factor=1):
    total = all_reduce_sum(torch.full((2,), float(number + dist.get_rank())))
    return dist.get_rank(), dist.get_world_size(), (total * factor).tolist()

@dist.launcher(n_gpus=2, device_type="cpu")
def decorated(number, factor=1):
    return add(number, factor)
"""
WAYS = """
import torch
import rankwise.compat.megengine.distributed as dist
from of_a_module import add, decorated

@dist.launcher
def alone():
    return dist.get_rank(), dist.get_world_size(), dist.is_distributed(), dist.get_backend()

@dist.launcher(n_gpus=2, backend="shm")
def fails(rank):
    dist.group_barrier()
    if dist.get_rank() == rank:
        raise ValueError(f"no data for {rank}")
    dist.group_barrier()

print(dist.launcher(add, n_gpus=2)(1, factor=2))
print(decorated(1, factor=2))
print(alone() if not torch.cuda.is_available() else [(0, 1, True, "none")])
try:
    fails(1)
except ValueError as error:
    print(error, [line.strip() for note in error.__notes__ for line in note.splitlines() if "raise" in line])
"""


def test_every_way_to_start(command: Command) -> None:
    command.write("of_a_module.py", MODULE)
    code, out, said = _run(command, command.write("train.py", WAYS))
    assert code == 0, said
    expected = "[(0, 2, [6.0, 6.0]), (1, 2, [6.0, 6.0])]"
    *ways, alone, failure = out.splitlines()
    assert ways == [expected, expected]
    assert alone == "[(0, 1, True, 'none')]"
    assert failure == """no data for 1 ['raise ValueError(f"no data for {rank}")']"""


def test_ranks_that_are_there_already(command: Command) -> None:
    command.write("of_a_module.py", MODULE)
    text = "from of_a_module import add, decorated, dist\nprint(decorated(1), dist.launcher(add)(1))\n"
    command.write("train.py", text)
    done = command.run("-n", "2", "train.py")
    assert done.stdout.splitlines() == [" ".join(["[(0, 2, [3.0, 3.0]), (1, 2, [3.0, 3.0])]"] * 2)] * 2, done.stderr
    refused = command.run("-n", "3", "train.py")
    assert "n_gpus=2, but `rankwise run` started 3" in refused.stderr


def test_ranks_that_are_there_already_on_two_machines(command: Command, port: int) -> None:
    command.write("of_a_module.py", MODULE)
    command.write("train.py", "from of_a_module import add, dist\nprint(dist.launcher(add)(1))\n")
    run = ("-m", "rankwise", "run", "--rendezvous", f"127.0.0.1:{port}", "--nodes", "2")
    pair = [
        command.start_python(*run, "--node-rank", node_rank, "-n", num_ranks, "train.py", env=SECRET)
        for node_rank, num_ranks in (("0", "1"), ("1", "2"))
    ]
    outputs = [process.communicate(timeout=80) for process in pair]
    assert [process.returncode for process in pair] == [0, 0], outputs
    here = [[(rank, 3, [6.0, 6.0]) for rank in ranks] for ranks in ((0,), (1, 2))]
    assert [out.splitlines() for out, _ in outputs] == [[str(values)] * len(values) for values in here]


MACHINE = """
import sys
import torch
import rankwise.compat.megengine.distributed as dist
from rankwise.compat.megengine.functional.distributed import all_gather

def worker():
    group = dist.new_group([3, 0])
    return dist.get_rank(), all_gather(torch.tensor([dist.get_rank()])).tolist(), dist.WORLD.is_single_machine

if __name__ == "__main__":
    first, port = int(sys.argv[1]), int(sys.argv[2])
    print(dist.launcher(worker, 2, 4, first, "127.0.0.1", port, device_type="cpu")())
"""


def test_two_machines(command: Command, port: int) -> None:
    script = command.write("train.py", MACHINE)
    pair = [_start(command, script, first, str(port)) for first in ("2", "0")]
    outputs = [process.communicate(timeout=80) for process in pair]
    assert [process.returncode for process in pair] == [0, 0], outputs
    # As MegEngine had it, each launcher is a machine of its own.
    told = [[(rank, [0, 1, 2, 3], False) for rank in ranks] for ranks in ((2, 3), (0, 1))]
    assert [out.splitlines()[-1] for out, _ in outputs] == [str(one) for one in told]


OWN = """
import multiprocessing, sys
import torch
import rankwise.compat.megengine.distributed as dist
from rankwise.compat.megengine.functional.distributed import all_reduce_max

def worker(rank, port):
    dist.init_process_group("127.0.0.1", port, 2, rank, rank, device_type="cpu")
    with dist.override_backend("nccl"):
        print(all_reduce_max(torch.tensor([rank])).tolist(), dist.get_backend(), flush=True)

if __name__ == "__main__":
    server = dist.Server(int(sys.argv[1]))
    ranks = [multiprocessing.Process(target=worker, args=(rank, server.py_server_port)) for rank in range(2)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join()
    sys.exit(sum(one.exitcode for one in ranks))
"""


def test_processes_that_join_by_themselves(command: Command, port: int) -> None:
    code, out, said = _run(command, command.write("train.py", OWN), str(port))
    assert code == 0, said
    assert out.splitlines() == ["[1] gloo", "[1] gloo"]


REFUSED = """
import rankwise.compat.megengine.distributed as dist
from rankwise.errors import ConfigurationError

for call in (
    lambda: dist.launcher(print, n_gpus=2, world_size=4),
    lambda: dist.launcher(print, n_gpus=3, world_size=4, port=29500),
    lambda: dist.launcher(print, n_gpus=2, world_size=1),
    lambda: dist.launcher(print, n_gpus=2, rank_start=2),
    lambda: dist.launcher(print, device_type="tpu"),
    lambda: dist.launcher(print, backend="ucx"),
    lambda: dist.launcher(3),
    lambda: dist.Server(),
    lambda: dist.override_backend("mpi").__enter__(),
    lambda: dist.get_backend(),
):
    try:
        call()
    except Exception as error:
        print(type(error).__name__, str(error).replace("\\n", " "))
try:
    dist.init_process_group("localhost", "29500", 2, 0, 0)
except TypeError as error:
    print(error)
"""


def test_refusals_say_what_to_write(command: Command) -> None:
    code, out, said = _run(command, command.write("train.py", REFUSED))
    assert code == 0, said
    words = [
        "pass n_gpus=4", "same number of ranks on each machine", "or omit it", "pass world_size=", "xpu, cpu, cuda",
        "auto, gloo, nccl", "requires a function", "omit Server", "NotJoined", "NotJoined",
        "port is of type int, not str",
    ]  # fmt: skip
    assert [word for word, line in zip(words, out.splitlines(), strict=True) if word not in line] == [], out
