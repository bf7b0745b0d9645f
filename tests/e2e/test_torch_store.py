# SPDX-License-Identifier: Apache-2.0
"""``MASTER_ADDR`` and ``MASTER_PORT`` lead to a store that torch's own client can use, apart from rankwise's."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.e2e.conftest import Command

BEGINNING = """
    import os, subprocess, sys, torch, torch.distributed as dist, torch.multiprocessing as mp
    from datetime import timedelta

    MASTER = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    LIMIT = timedelta(seconds=30)

    def total(**world):
        dist.init_process_group("gloo", timeout=LIMIT, **world)
        value = torch.tensor([dist.get_rank() + 1])
        dist.all_reduce(value)
        dist.destroy_process_group()
        sys.stdout.write(f"{value.item()}\\n")
        sys.stdout.flush()

    def client():
        return dist.TCPStore(*MASTER, is_master=False, timeout=LIMIT)
"""


def lines(command: Command, *words: str, env: dict[str, str] | None = None) -> list[str]:
    """Run a script that is to end well, and return what its ranks wrote, sorted."""
    ended = command.run(*words, env=env)
    assert ended.returncode == 0, ended.stderr
    assert "Ping failed" not in ended.stderr
    return sorted(ended.stdout.splitlines())


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_ranks_meet_at_the_given_address(command: Command, num_ranks: int, host: str) -> None:
    command.write(
        "train.py",
        BEGINNING
        + f"""
    for _ in range(2):
        total(init_method=f"tcp://{host}:{{MASTER[1]}}", rank=RANK, world_size=WORLD_SIZE)
    for _ in range(2):
        total()
    """,
    )
    expected = str(sum(range(1, num_ranks + 1)))
    assert lines(command, "-n", str(num_ranks), "train.py") == [expected] * num_ranks * 4


@pytest.mark.parametrize(("num_ranks", "method"), [(1, "tcp"), (2, "env")])
def test_each_rank_spawns_workers_that_make_one_world(command: Command, num_ranks: int, method: str) -> None:
    # As pytorch/examples' imagenet does with --multiprocessing-distributed.
    command.write(
        "main.py",
        BEGINNING
        + f"""
    def main_worker(gpu, ngpus_per_node, node_rank, world_size):
        dist_url = "tcp://%s:%d" % MASTER if {method!r} == "tcp" else "env://"
        total(init_method=dist_url, rank=node_rank * ngpus_per_node + gpu, world_size=world_size)

    if __name__ == "__main__":
        mp.spawn(main_worker, nprocs=2, args=(2, RANK, 2 * WORLD_SIZE))
    """,
    )
    world_size = 2 * num_ranks
    expected = str(sum(range(1, world_size + 1)))
    assert lines(command, "-n", str(num_ranks), "main.py") == [expected] * world_size


def test_a_program_that_a_rank_starts_joins_for_it(command: Command) -> None:
    command.write("worker.py", BEGINNING + "\n    total()\n")
    command.write(
        "train.py",
        """
        import subprocess, sys
        subprocess.run([sys.executable, "worker.py"], check=True)
        """,
    )
    assert lines(command, "-n", "2", "train.py") == ["3", "3"]


def test_workers_of_the_only_rank_may_meet_at_an_address_of_their_own(command: Command) -> None:
    # As the DDP tutorial does.
    command.write(
        "train.py",
        BEGINNING
        + """
    import socket

    def work(rank, port):
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        total(rank=rank, world_size=2)

    if __name__ == "__main__":
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        mp.spawn(work, nprocs=2, args=(port,))
    """,
    )
    assert lines(command, "-n", "1", "train.py") == ["3", "3"]


@pytest.mark.parametrize("has_own_port", [True, False])
def test_workers_of_several_ranks_meet_elsewhere_or_are_an_error_at_once(
    command: Command, *, has_own_port: bool
) -> None:
    command.write(
        "train.py",
        BEGINNING
        + f"""
    import socket

    def work(rank, port):
        os.environ |= {{"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}}
        total(rank=rank, world_size=2)

    if __name__ == "__main__":
        free = socket.create_server(("127.0.0.1", 0))
        port = free.getsockname()[1]
        if {has_own_port}:
            free.close()  # else it stands for the world that another rank's workers have opened there
        mp.spawn(work, nprocs=2, args=(port,))
    """,
    )
    if has_own_port:
        assert lines(command, "-n", "2", "train.py") == ["3"] * 4
        return
    ended = command.run("-n", "2", "train.py")
    assert ended.returncode == 1
    assert "each of the 2 ranks runs the whole script, and starts processes of its own" in ended.stderr
    assert "rankwise run -n 1" in ended.stderr


@pytest.mark.parametrize("elsewhere", [True, False])
def test_forks_of_a_rank_make_a_world_of_their_own(command: Command, *, elsewhere: bool) -> None:
    command.write(
        "train.py",
        BEGINNING
        + f"""
    import multiprocessing, socket

    def work(rank, port):
        if {elsewhere}:
            os.environ["MASTER_PORT"] = str(port)
            total(rank=rank, world_size=2)
        else:
            total(rank=2 * RANK + rank, world_size=2 * WORLD_SIZE)

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=work, args=(rank, port)) for rank in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0]
    """,
    )
    assert lines(command, "-n", "2", "train.py") == (["3"] if elsewhere else ["10"]) * 4


def test_ranks_make_another_world_at_another_address(command: Command) -> None:
    command.write(
        "train.py",
        BEGINNING
        + """
    import socket

    store = client()
    # A port for each world: torch closes the one before a little later than destroy_process_group() returns.
    if RANK == 0:
        free = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
        ports = [str(one.getsockname()[1]) for one in free]
        for one in free:
            one.close()
        store.set("ports", " ".join(ports))
    by_url, by_variable, alone = store.get("ports").decode().split()
    total(init_method=f"tcp://127.0.0.1:{by_url}", rank=WORLD_SIZE - 1 - RANK, world_size=WORLD_SIZE)
    total(store=dist.PrefixStore("mine", store), rank=RANK, world_size=WORLD_SIZE)
    os.environ["MASTER_PORT"] = by_variable
    total(rank=WORLD_SIZE - 1 - RANK, world_size=WORLD_SIZE)
    if RANK == 0:
        os.environ["MASTER_PORT"] = alone
        total(rank=0, world_size=1)
    """,
    )
    assert lines(command, "-n", "2", "train.py") == ["1", *["3"] * 6]


def test_an_attempt_finds_no_key_of_the_one_before(command: Command) -> None:
    command.write(
        "train.py",
        BEGINNING
        + """
    store, attempt = client(), os.environ["TORCHELASTIC_RESTART_COUNT"]
    dist.init_process_group("gloo")
    sys.stdout.write(f"{attempt} {store.check(['mine'])}\\n")
    dist.barrier()
    store.set("mine", "")
    dist.destroy_process_group()
    sys.exit(attempt == "0")
    """,
    )
    assert lines(command, "-n", "2", "--max-restarts", "1", "train.py") == ["0 False", "0 False", "1 False", "1 False"]


def test_nothing_of_rankwise_is_in_it_nor_elsewhere_to_be_reached(command: Command) -> None:
    command.write(
        "train.py",
        BEGINNING
        + """
    import rankwise as rw
    from rankwise.world import network

    with rw.join() as world:
        rw.all_reduce(torch.ones(3))
        store = client()
        outside = network.main_address()
        try:
            __import__("socket").create_connection((outside or "0.0.0.1", MASTER[1]), timeout=5)
            is_open = True
        except OSError:
            is_open = False
        rw.barrier()
        sys.stdout.write(f"{store.num_keys()} {is_open} {MASTER[0]}\\n")
    """,
    )
    assert lines(command, "-n", "2", "train.py") == ["0 False 127.0.0.1"] * 2


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to start a process of another user")
@pytest.mark.parametrize("option", ["auto", "on"])
def test_another_user_reaches_it_only_if_it_was_opened_to_all(command: Command, option: str) -> None:
    command.write(
        "stranger.py",
        """
        import socket, struct, sys
        with socket.create_connection(("127.0.0.1", int(sys.argv[1])), 10) as asking:
            try:
                asking.sendall(struct.pack("=BIBI", 0, 0x3C85F7CE, 13, 7))
                print(len(asking.recv(4)))
            except OSError:
                print(0)
        """,
    )
    command.write(
        "train.py",
        BEGINNING
        + """
    if RANK == 0:
        words = ["setpriv", "--reuid=65534", "--clear-groups", sys.executable, "-", str(MASTER[1])]
        with open("stranger.py") as script:
            subprocess.run(words, stdin=script, check=True)
    total(init_method="tcp://%s:%d" % MASTER, rank=RANK, world_size=WORLD_SIZE)
    """,
    )
    answered = "0" if option == "auto" else "4"
    words = () if option == "auto" else ("--torch-store", option)
    assert lines(command, "-n", "2", *words, "train.py") == sorted([answered, "3", "3"])


@pytest.mark.parametrize("by_variable", [True, False])
def test_one_option_closes_it(command: Command, *, by_variable: bool) -> None:
    command.write(
        "train.py",
        BEGINNING
        + """
    total()
    assert "%s:%d" % MASTER == os.environ["RANKWISE_STORE"] and "TORCHELASTIC_USE_AGENT_STORE" not in os.environ
    total(init_method="tcp://%s:%d" % MASTER, rank=RANK, world_size=WORLD_SIZE)
    """,
    )
    words = ["-n", "2", *([] if by_variable else ["--torch-store", "off"]), "train.py"]
    ended = command.run(*words, env={"RANKWISE_TORCH_STORE": "off"} if by_variable else {})
    assert ended.returncode == 1
    assert ended.stdout == "3\n3\n"
    assert "is rankwise's own store, which torch's client cannot use" in ended.stderr
    assert "--torch-store on" in ended.stderr


def test_a_bad_variable_is_reported_before_anything_starts(command: Command) -> None:
    command.write("train.py", "print('started')")
    ended = command.run("-n", "2", "train.py", env={"RANKWISE_TORCH_STORE": "1"})
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "RANKWISE_TORCH_STORE must be on, off or auto, got '1'." in ended.stderr


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("world_size=4, rank=RANK", "rank=0 world_size=4"),
        ("rank=1 - RANK", "rank=1 world_size=2"),
        ("world_size=1, rank=0", "rank=0 world_size=1"),
    ],
)
def test_numbers_that_contradict_the_launcher_are_an_error_at_once(command: Command, asked: str, said: str) -> None:
    command.write("train.py", BEGINNING + f"\n    if RANK == 0:\n        dist.init_process_group('gloo', {asked})\n")
    ended = command.run("-n", "2", "train.py")
    assert ended.returncode == 1
    assert "the launcher: RANK=0 WORLD_SIZE=2\n" in ended.stderr
    assert f"the script: {said}, from its arguments" in ended.stderr


def test_variables_that_contradict_the_launcher_are_an_error_at_once(command: Command) -> None:
    command.write("train.py", BEGINNING + "\n    os.environ['WORLD_SIZE'] = '4'; total()\n")
    ended = command.run("-n", "2", "train.py")
    assert ended.returncode == 1
    assert "init_process_group() was called for rank 0 of 4, but this process is rank 0 of 2." in ended.stderr
    assert "rankwise run -n 4" in ended.stderr
