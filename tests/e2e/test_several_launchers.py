# SPDX-License-Identifier: Apache-2.0
"""Several launchers of one job on one machine: what they agree on, whom they refuse, and what is asked of them."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rankwise.errors import fold_ranks
from rankwise.replicate.loss.reports import channel_length
from rankwise.store.wire import listen
from rankwise.world import network

if TYPE_CHECKING:
    from collections.abc import Iterator

    from conftest import Command

    from tests.warm import Started

HELLO = """
import rankwise as rw
with rw.join() as world:
    print(world.rank, world.node_rank, world.num_nodes, rw.all_reduce(world.rank))
"""
SECRET = {"RANKWISE_SECRET": "of these tests"}


@pytest.fixture
def port() -> int:
    """A port that was free a moment ago."""
    with listen("127.0.0.1", 0) as listener:
        return listener.getsockname()[1]


class Launchers:
    """Launchers of one test, ended with it."""

    def __init__(self, command: Command, port: int) -> None:
        self.command = command
        self.port = port
        self.processes: list[Started] = []

    def start(
        self, *words: str, env: dict[str, str] | None = None, program: tuple[str, str] = ("-m", "rankwise")
    ) -> Started:
        """Start ``rankwise run --rendezvous ... words``."""
        meeting = ("run", "--rendezvous", f"127.0.0.1:{self.port}")
        process = self.command.start_python(*program, *meeting, *words, env={**SECRET, **(env or {})})
        self.processes.append(process)
        return process


@pytest.fixture
def launchers(command: Command, port: int) -> Iterator[Launchers]:
    started = Launchers(command, port)
    yield started
    for process in started.processes:
        process.kill()
        process.communicate()


def test_two_launchers_run_one_job(command: Command, launchers: Launchers) -> None:
    command.write("train.py", HELLO)
    pair = [launchers.start("-n", number, "--nodes", "2", "train.py") for number in ("2", "1")]
    outputs = [process.communicate(timeout=80) for process in pair]
    assert [process.returncode for process in pair] == [0, 0], outputs
    lines = sorted(line for out, _ in outputs for line in out.splitlines())
    assert [line.split()[0] for line in lines] == ["0", "1", "2"]
    assert {line.split()[-1] for line in lines} == {"3"}
    assert {line.split()[2] for line in lines} == {"2"}
    for out, said in outputs:
        ranks = [int(line.split()[0]) for line in out.splitlines()]
        assert f"[rankwise] {fold_ranks(ranks)} of 3 here, node {out.split()[1]} of 2 (" in said


def test_a_failure_is_reported_in_full_once_and_everywhere_by_its_exit_code(
    command: Command, launchers: Launchers
) -> None:
    command.write("train.py", HELLO + "    if world.rank == 1:\n        raise SystemExit(7)\n    rw.barrier()\n")
    first = launchers.start("-n", "1", "--nodes", "2", "--node-rank", "0", "train.py")
    second = launchers.start("-n", "1", "--nodes", "2", "--node-rank", "1", "train.py")
    (_, said), (_, said_too) = first.communicate(timeout=80), second.communicate(timeout=80)
    assert (first.returncode, second.returncode) == (7, 7), said + said_too
    assert "failed first: called sys.exit(7) at train.py:" in said
    assert "failed first: called sys.exit(7) at train.py:" in said_too
    assert said_too.endswith("node 0 shows the full report\n")


@pytest.mark.parametrize("is_asked_for", [True, False])
def test_torchs_store_is_served_to_several_machines_where_that_is_asked_for(
    command: Command, launchers: Launchers, *, is_asked_for: bool
) -> None:
    command.write(
        "train.py",
        """
        import os, torch, torch.distributed as dist
        master = "%s:%s" % (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])
        is_torchs, is_served = master != os.environ["RANKWISE_STORE"], "TORCHELASTIC_USE_AGENT_STORE" in os.environ
        method = f"tcp://{master}" if is_torchs else "env://"
        dist.init_process_group("gloo", method, rank=int(os.environ["RANK"]), world_size=2)
        total = torch.ones(1)
        dist.all_reduce(total)
        dist.destroy_process_group()
        print(is_torchs, is_served, total.item())
        """,
    )
    words = ("-n", "1", "--nodes", "2", *(["--torch-store", "on"] if is_asked_for else []), "train.py")
    pair = [launchers.start(*words), launchers.start(*words)]
    outputs = [process.communicate(timeout=80) for process in pair]
    assert [process.returncode for process in pair] == [0, 0], outputs
    assert [out for out, _ in outputs] == [f"{is_asked_for} {is_asked_for} 2.0\n"] * 2


@pytest.mark.parametrize(
    ("words", "env", "text"),
    [
        (("--nodes", "2", "--node-rank", "0", "train.py"), {}, "is in use"),
        (("--nodes", "2", "--torch-store", "on", "train.py"), {}, "do not run the same job"),
        (("--nodes", "2", "other.py"), {}, "do not run the same job"),
        (("--nodes", "2", "train.py"), {"RANKWISE_SECRET": "another"}, "do not hold the same secret"),
    ],
)
def test_a_contradicting_launcher_is_refused_and_the_job_continues(
    command: Command, launchers: Launchers, words: tuple[str, ...], env: dict[str, str], text: str
) -> None:
    command.write("train.py", HELLO)
    command.write("other.py", HELLO + "\n")
    first = launchers.start("-n", "1", "--nodes", "2", "--node-rank", "0", "train.py")
    assert first.stderr is not None
    while "joined with" not in first.stderr.readline():
        assert first.poll() is None
    wrong = launchers.start("-n", "1", *words, env=env)
    _, said = wrong.communicate(timeout=80)
    assert (wrong.returncode, text in said, "\n  do " in said) == (2, True, True), said
    right = launchers.start("-n", "1", "--nodes", "2", "--node-rank", "1", "train.py")
    assert (right.wait(50), first.wait(50)) == (0, 0)


def test_two_launchers_with_one_node_rank_are_an_error(command: Command, launchers: Launchers) -> None:
    command.write("train.py", HELLO)
    first = launchers.start("-n", "1", "--nodes", "3", "--node-rank", "0", "train.py")
    launchers.start("-n", "1", "--nodes", "3", "--node-rank", "1", "train.py")
    assert first.stderr is not None
    while "(2 of 3 nodes)" not in first.stderr.readline():
        assert first.poll() is None
    _, said = launchers.start("-n", "1", "--nodes", "3", "--node-rank", "1", "train.py").communicate(timeout=80)
    assert "Two machines are node 1" in said


@pytest.mark.parametrize(("number", "text"), [("0", "node 1 never joined"), ("1", "did not answer within")])
def test_a_node_that_never_comes_is_named(command: Command, launchers: Launchers, number: str, text: str) -> None:
    command.write("train.py", HELLO)
    words = ("--nodes", "2", "--node-rank", number, "--rendezvous-timeout", "1", "train.py")
    _, said = launchers.start("-n", "1", *words).communicate(timeout=80)
    assert text in said
    assert "\n  do " in said


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--nodes", "2"), "machines need a rendezvous"),
        (("--nodes", "2:1", "--rendezvous", "127.0.0.1:1"), "got 2:1"),
        (("--nodes", "two"), "neither a number nor MIN:MAX"),
        (("--nodes", "2", "--rendezvous", "here"), "is not host:port"),
        (("--nodes", "2", "--node-rank", "2", "--rendezvous", "127.0.0.1:1"), "node_rank must be from 0 to 1, got 2"),
        (("--nodes", "2", "--rendezvous", "no.such.host.invalid:29400"), "cannot resolve the host name"),
        (("--nodes", "2", "--interface", "no0", "--rendezvous", "127.0.0.1:29400"), "no network interface 'no0'"),
    ],
)
def test_a_mistake_is_reported_immediately(command: Command, words: tuple[str, ...], text: str) -> None:
    command.write("train.py", HELLO)
    ended = command.run(*words, "train.py", env=SECRET)
    assert (ended.returncode, text in ended.stderr) == (2, True), ended.stderr


def test_ranks_send_through_the_interface_that_is_named(command: Command, port: int) -> None:
    command.write("train.py", "import os; print(os.environ['GLOO_SOCKET_IFNAME'], os.environ['NCCL_SOCKET_IFNAME'])")
    # An address of another interface, where there is one: else it would be lo by itself.
    address = network.main_address() or "127.0.0.1"
    ended = command.run("--rendezvous", f"{address}:{port}", "--interface", "lo", "train.py", env=SECRET)
    assert ended.stdout == "lo =lo\n", ended.stderr


def test_ranks_compare_what_they_call_where_that_is_asked(command: Command) -> None:
    # Without being asked to they would hang here first: gradients and all_reduce wait at different places.
    command.write(
        "train.py",
        """
        import torch
        import rankwise as rw
        with rw.join() as world:
            model = rw.replicate(torch.nn.Linear(5, 3))
            if world.rank == 0:
                rw.all_reduce(torch.ones(2))
            else:
                model(torch.randn(2, 5)).sum().backward()
        """,
    )
    ended = command.run("-n", "2", "--check", "train.py")
    assert ended.returncode == 1
    told = "CollectiveMismatch: Ranks called different collectives."
    assert told in ended.stderr
    after = ended.stderr.rpartition(told)[2]
    assert 'rank 0: all_reduce("sum", float32[2]) at train.py:7 in <module>' in after
    assert f"rank 1: loss of Linear, bucket 0: float64[{channel_length(2)}] at train.py:9 in <module>" in after


def test_stacks_shows_where_ranks_are(command: Command, launchers: Launchers) -> None:
    command.write(
        "train.py",
        """
        import os, time
        import rankwise as rw
        with rw.join() as world:
            rw.all_reduce(1)
            open(f"reached-{world.rank}", "w").close()
            if world.rank == 1:
                time.sleep(1000)
            rw.barrier()
        """,
    )
    pair = [launchers.start("-n", "1", "--nodes", "2", "train.py") for _ in range(2)]
    deadline = time.monotonic() + 50
    while len(list(command.folder.glob("reached-*"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    words = ("stacks", "--job", str(pair[0].pid))
    shown = command.rankwise(*words, seconds=50)
    while "waiting in barrier()" not in shown.stdout:  # rank 0 is on its way there
        assert time.monotonic() < deadline, shown.stdout + shown.stderr
        shown = command.rankwise(*words, seconds=50)
    assert shown.returncode == 0, shown.stderr
    assert "train.py:9" in shown.stdout
    told = json.loads(command.rankwise(*words, "--json", seconds=50).stdout)
    assert sorted(told["ranks"]) == ["0", "1"]
    pair[0].send_signal(signal.SIGINT)
    assert {process.wait(30) for process in pair} == {130}


def test_a_lost_rendezvous_ends_the_others(command: Command, launchers: Launchers) -> None:
    command.write("train.py", HELLO + "    import time\n    open('reached', 'w').close()\n    time.sleep(1000)\n")
    first = launchers.start("-n", "1", "--nodes", "2", "--node-rank", "0", "train.py")
    second = launchers.start("-n", "1", "--nodes", "2", "--node-rank", "1", "train.py")
    deadline = time.monotonic() + 50
    while not (command.folder / "reached").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    first.kill()
    _, said = second.communicate(timeout=30)
    assert second.returncode == 1
    assert "lost the rendezvous: its launcher has exited; every rank here has been terminated" in said


HOLD_TORCH = """
import os, sys
def hold(event, arguments):
    is_torch = event == "open" and "/torch/__init__." in str(arguments[0]).replace("__pycache__/", "")
    if is_torch and os.path.exists("torch-may-be-imported"):
        open("torch-may-be-imported").close()
        os.remove("torch-may-be-imported")
sys.addaudithook(hold)
from rankwise.cli import main
sys.exit(main())
"""
"""``rankwise``, whose import of torch waits until the test opens a named pipe: a machine that is busy without end."""


@pytest.mark.parametrize("number", [0, 1])
def test_a_restarted_launcher_is_waited_for_before_it_has_imported_torch(
    command: Command, launchers: Launchers, number: int
) -> None:
    ending = """
    import os, time
    open(f"reached-{world.rank}", "w").close()
    time.sleep(0 if os.path.exists("restarted") else 1000)
"""
    command.write("train.py", HELLO + ending)
    words = ("-n", "1", "--nodes", "2", "--max-restarts", "1", "--node-rank")
    pair = [launchers.start(*words, node, "train.py") for node in "01"]
    deadline = time.monotonic() + 50
    while len(list(command.folder.glob("reached-*"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    pair[number].kill()
    command.write("restarted", "")
    torch_may_be_imported = command.folder / "torch-may-be-imported"
    os.mkfifo(torch_may_be_imported)
    # A variable that Python reads when it starts: a new process, which has not imported torch as those forked have.
    program = ("-c", HOLD_TORCH)
    pair[number] = launchers.start(*words, str(number), "train.py", program=program, env={"PYTHONHASHSEED": "0"})
    waiting = pair[1 - number]
    assert waiting.stderr is not None
    said = ""
    while "has started and is getting ready" not in said:
        said = waiting.stderr.readline()
        assert said, "the other launcher has ended"
    assert (f"the launcher at 127.0.0.1:{launchers.port} has" in said) == (number == 0)
    assert "libtorch" not in Path(f"/proc/{pair[number].pid}/maps").read_text(encoding="utf-8")
    torch_may_be_imported.open("w").close()
    outputs = [process.communicate(timeout=50) for process in pair]
    assert [process.returncode for process in pair] == [0, 0], outputs
    assert outputs[number][0] == f"{number} {number} 2 1\n"
