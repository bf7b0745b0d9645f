# SPDX-License-Identifier: Apache-2.0
"""Joining and leaving, with real processes started by another program or by none."""

from __future__ import annotations

import socket
import sys
from typing import TYPE_CHECKING

import pytest
import torch

import rankwise as rw
from rankwise.errors import ConfigurationError, NotJoined, PeerFailed, PeerMissing
from rankwise.testing import run_ranks

if TYPE_CHECKING:
    from pathlib import Path

    from rankwise.world.facts import World
    from tests.warm import Started, WarmPython

LAUNCHED_BY = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
SCRIPT = """
import contextlib, faulthandler, os, socket, sys, threading, torch, rankwise as rw
faulthandler.dump_traceback_later(60, exit=True)  # a rank that hangs says where, before the limit of the test
rank, world_size, url, what = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
torch.set_num_threads(1)
if rank == 1 and what in ("die", "fail"):
    torch.distributed.init_process_group = lambda **_: os.kill(os.getpid(), 9) if what == "die" else 1 / 0
limit = 300 if what in ("die", "fail") else 5

class LongEnd:
    def __del__(self):
        # Holds up the end of Python until rank zero, which serves the store, is gone, and a thread in torch notices.
        address = url.removeprefix("tcp://").split(":")
        with contextlib.suppress(OSError):
            while True:
                socket.create_connection(address).close()
        threading.Event().wait(1)

if rank == 2 and what == "fail":
    until_the_end = LongEnd()
world = rw.join(init_method=url, rank=rank, world_size=world_size, timeout_seconds=limit)
if what == "raise" and rank == 1:
    raise ValueError("rank one is bad")
if what == "exit" and rank == 1:
    sys.exit(0)
print(f"{world.rank} of {world.world_size}: {rw.all_reduce(rank)}", flush=True)
"""

# What outlives a world holds on to the store that rank 0 served in it.
SEVERAL_WORLDS = {
    "rankwise": """
import sys, torch, rankwise as rw
torch.set_num_threads(1)
kept = []
for number in range(3):
    world = rw.join(init_method=sys.argv[3], rank=int(sys.argv[1]), world_size=int(sys.argv[2]), timeout_seconds=30)
    model = rw.replicate(torch.nn.Linear(3, 2))
    kept.append(model)
    model(torch.ones(2, 3)).mean().backward()
    rw.leave()
    print(number, flush=True)
""",
    "horovod": """
import os, sys, torch, rankwise.compat.horovod as hvd
torch.set_num_threads(1)
host, port = sys.argv[3].removeprefix("tcp://").split(":")
os.environ |= {"RANK": sys.argv[1], "WORLD_SIZE": sys.argv[2], "MASTER_ADDR": host, "MASTER_PORT": port}
for number in range(3):
    hvd.init()
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [2, 2]
    hvd.shutdown()
    print(number, flush=True)
""",
}


def start(warm_python: WarmPython, folder: Path, rank: int, *words: object) -> Started:
    """Start one rank as its own process, as a person would in another terminal; ``words`` as ``SCRIPT`` has them."""
    script = folder / "script.py"
    if not script.exists():  # Another rank may be reading it.
        script.write_text(SCRIPT)
    variables = {k: v for k, v in warm_python.environment.items() if k not in LAUNCHED_BY}
    return warm_python.start([str(script), str(rank), *map(str, words)], folder, variables)


def free_port() -> int:
    """Return a port for a rank zero that a person tells where to listen."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def run_by_hand(
    warm_python: WarmPython, folder: Path, world_size: int, url: str, what: str = "run"
) -> list[tuple[int | None, str, str]]:
    """Start all ranks and return exit code, stdout and stderr of each."""
    processes = [start(warm_python, folder, rank, world_size, url, what) for rank in range(world_size)]
    ended = []
    for process in processes:
        out, err = process.communicate(timeout=80)
        ended.append((process.returncode, out, err))
    return ended


@pytest.mark.parametrize("scheme", ["tcp", "file"])
def test_explicit_init_method(warm_python: WarmPython, tmp_path: Path, scheme: str) -> None:
    url = f"tcp://127.0.0.1:{free_port()}" if scheme == "tcp" else f"file://{tmp_path}/store"
    for rank, (code, out, err) in enumerate(run_by_hand(warm_python, tmp_path, 3, url)):
        assert code == 0, err
        assert out == f"{rank} of 3: 3\n"


@pytest.mark.parametrize("words", SEVERAL_WORLDS)
def test_worlds_follow_each_other_on_one_port(warm_python: WarmPython, tmp_path: Path, words: str) -> None:
    (tmp_path / "script.py").write_text(SEVERAL_WORLDS[words])
    for code, out, err in run_by_hand(warm_python, tmp_path, 2, f"tcp://127.0.0.1:{free_port()}"):
        assert code == 0, err
        assert out == "0\n1\n2\n"


def test_an_uncaught_error_after_a_plain_join_reaches_the_others(warm_python: WarmPython, tmp_path: Path) -> None:
    ended = run_by_hand(warm_python, tmp_path, 3, f"tcp://127.0.0.1:{free_port()}", "raise")
    assert ended[1][0] == 1
    for rank in (0, 2):
        code, _, err = ended[rank]
        assert code == 1
        assert "PeerFailed: Rank 1 failed: ValueError" in err
        assert "rank one is bad" in err


def test_a_rank_that_exits_with_code_zero_is_named(warm_python: WarmPython, tmp_path: Path) -> None:
    ended = run_by_hand(warm_python, tmp_path, 3, f"tcp://127.0.0.1:{free_port()}", "exit")
    assert ended[1][0] == 0
    for rank in (0, 2):
        assert ended[rank][0] == 1
        assert "rank 1 has left" in ended[rank][2]


@pytest.mark.parametrize(
    ("what", "words"),
    [("die", "rank 1 exited without reporting an error"), ("fail", "PeerFailed: Rank 1 failed: ZeroDivisionError")],
)
def test_a_rank_that_ends_while_the_group_opens_is_named(
    warm_python: WarmPython, tmp_path: Path, what: str, words: str
) -> None:
    # torch alone would wait for it for as long as the limit of join(), which is more than the test's.
    ended = run_by_hand(warm_python, tmp_path, 3, f"tcp://127.0.0.1:{free_port()}", what)
    for rank in (0, 2):
        assert ended[rank][0] == 1
        assert words in ended[rank][2]


def _exit_of_one(world: World, code: int | str | None) -> None:
    if world.rank == 1:
        sys.exit(code)
    rw.barrier()


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        (None, PeerMissing, "rank 1 has left"),
        (0, PeerMissing, "rank 1 has left"),
        (3, PeerFailed, "Rank 1 failed: SystemExit"),
        ("no data", PeerFailed, "Rank 1 failed: SystemExit"),
    ],
)
def test_an_exit_inside_the_block_is_a_failure_where_its_code_says_so(
    code: int | str | None, kind: type[Exception], words: str
) -> None:
    other, exited = run_ranks(_exit_of_one, 2, code)
    assert isinstance(exited.error, SystemExit)
    assert exited.error.code == code
    assert isinstance(other.error, kind), other.error
    assert words in str(other.error)


def test_a_port_in_use_is_reported(warm_python: WarmPython, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        process = start(warm_python, tmp_path, 0, 2, f"tcp://127.0.0.1:{port}", "run")
        _, err = process.communicate(timeout=80)
    assert process.returncode == 1
    assert f"cannot be served on 127.0.0.1:{port}: Address already in use" in err
    assert "use another port" in err


def test_a_rank_that_never_starts_is_named(warm_python: WarmPython, tmp_path: Path) -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    processes = [start(warm_python, tmp_path, rank, 3, url, "run") for rank in (0, 2)]
    for process in processes:
        _, err = process.communicate(timeout=80)
        assert process.returncode == 1
        assert "join() timed out after 5 s waiting for rank 1" in err


def _facts(world: World) -> World:
    return world


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_world_has_the_right_values(world_size: int) -> None:
    for rank, result in enumerate(run_ranks(_facts, world_size)):
        world = result.get()
        assert (world.rank, world.world_size) == (rank, world_size)
        assert (world.local_rank, world.local_world_size) == (rank, world_size)
        assert (world.node_rank, world.num_nodes) == (0, 1)
        assert world.device == "cpu"
        assert world.backend == ("gloo" if world_size > 1 else "none")


def _wrong_joins(_: World) -> list[str]:
    errors = []
    with pytest.raises(ConfigurationError) as caught:
        rw.join()
    errors.append(str(caught.value))
    rw.leave()
    with pytest.raises(NotJoined) as not_joined:
        rw.all_reduce(torch.ones(1))
    errors.append(str(not_joined.value))
    for arguments in ({"rank": 0}, {"backend": "nccl", "device": "cpu", **_two()}, {"backend": "mpi", **_two()}):
        with pytest.raises(ConfigurationError) as caught:
            rw.join(**arguments)  # type: ignore[arg-type]
        errors.append(str(caught.value))
    return errors


def _two() -> dict[str, object]:
    return {"init_method": "tcp://127.0.0.1:1", "rank": 5, "world_size": 2}


def test_wrong_joins_say_what_to_do() -> None:
    (result,) = run_ranks(_wrong_joins, 1)
    joined, not_joined, incomplete, *_ = result.get()
    assert "already joined a world" in joined
    assert "call rankwise.join() first" in not_joined
    assert "without init_method" in incomplete
