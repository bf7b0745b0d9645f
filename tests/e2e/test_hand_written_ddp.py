# SPDX-License-Identifier: Apache-2.0
"""Scripts written for torch.distributed alone, unchanged under ``rankwise run``: they train, or say what to write."""

from __future__ import annotations

import inspect
import json
from typing import TYPE_CHECKING

import pytest
import torch

from rankwise.launch.fork_server.entrypoint import local_rank_option_in, passes_local_rank
from rankwise.launch.report.failure_report import advice_for

if TYPE_CHECKING:
    from conftest import Command

Data = tuple[torch.Tensor, torch.Tensor, torch.nn.Module]
HEAD = """
from __future__ import annotations
import torch
"""
TRAIN = """
import argparse, json, os
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("epochs", type=int)
options = parser.parse_args()

if torch.cuda.is_available():
    torch.cuda.set_device(options.local_rank)
dist.init_process_group(INIT)
assert int(os.environ["RANK"]) == dist.get_rank() and options.local_rank == int(os.environ["LOCAL_RANK"])
dataset = TensorDataset(x, y)
sampler = DistributedSampler(dataset, shuffle=False)
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for epoch in range(options.epochs):
    sampler.set_epoch(epoch)
    for part, target in DataLoader(dataset, batch_size=8 // dist.get_world_size(), sampler=sampler):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(part), target).backward()
        optimizer.step()
if dist.get_rank() == 0:
    with open("trained.json", "w") as file:
        json.dump([p.tolist() for p in model.module.parameters()], file)
dist.barrier()
dist.destroy_process_group()
"""
SPAWN = """
import os, socket, sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

def work(rank, world_size, port):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(port)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    total = torch.tensor(rank + 1)
    dist.all_reduce(total)
    assert total == 6
    dist.destroy_process_group()

if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    mp.spawn(work, args=(3, port), nprocs=3)
"""
FAILING = {
    "nccl": (1, 'dist.init_process_group("nccl")', "NCCL needs GPUs"),
    "device": (1, "torch.cuda.set_device(0)", "this rank sees no GPU"),
    "no wrapper": (2, "torch.nn.Linear(1, 1).module", "model in place of model.module"),
    "model on a gpu": (1, 'torch.nn.Linear(1, 1).to("cuda")', "this rank sees no GPU"),
    "sampler first": (
        1,
        "torch.utils.data.distributed.DistributedSampler(range(10))",
        "call torch.distributed.init_process_group() before this line",
    ),
    "twice": (1, 'dist.init_process_group("gloo")\ndist.init_process_group("gloo")', "once per process"),
    "device_ids": (
        1,
        """
        dist.init_process_group("gloo")
        torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1), device_ids=[0])
        """,
        "omit device_ids and output_device",
    ),
    "unused": (
        2,
        """
        dist.init_process_group("gloo")
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.used, self.unused = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
            def forward(self, x):
                return self.used(x)
        model = torch.nn.parallel.DistributedDataParallel(Net())
        for _ in range(2):
            model(torch.ones(3, 2)).sum().backward()
        """,
        "rankwise.replicate(model) needs no flag",
    ),
    "port": (
        1,
        """
        import socket
        taken = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        dist.init_process_group("gloo", init_method=address, rank=0, world_size=1)
        """,
        "remove init_method",
    ),
}


def data() -> Data:
    """Return samples, targets and a model: for the scripts, which hold this function's source, and for comparison."""
    torch.manual_seed(5)
    x, y = torch.randn(24, 3, dtype=torch.float64), torch.randn(24, 1, dtype=torch.float64)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)).double()
    return x, y, model


def trained_plainly(epochs: int) -> list[torch.Tensor]:
    """Train the same model by the same global batches, in this process and without ranks."""
    x, y, model = data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(epochs):
        for part, target in zip(x.split(8), y.split(8), strict=True):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(part), target).backward()
            optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize(("ranks", "init"), [(2, '"gloo"'), (4, '"gloo", init_method="env://"'), (1, "")], ids=str)
def test_a_script_trains_as_it_is(command: Command, ranks: int, init: str) -> None:
    command.write("train.py", f"{HEAD}{inspect.getsource(data)}x, y, model = data()\n{TRAIN.replace('INIT', init)}")
    done = command.run("--device", "cpu", "-n", str(ranks), "train.py", "3")
    assert done.returncode == 0, done.stderr
    assert "train.py accepts --local_rank: each rank is passed its own" in done.stderr
    got = json.loads((command.folder / "trained.json").read_text())
    for mine, expected in zip(got, trained_plainly(3), strict=True):
        torch.testing.assert_close(torch.tensor(mine, dtype=torch.float64), expected, rtol=1e-10, atol=1e-12)


def test_a_module_is_passed_its_local_rank_in_the_spelling_it_takes(command: Command) -> None:
    body = """
        import argparse, os
        parser = argparse.ArgumentParser()
        parser.add_argument("--local-rank", dest="number", type=int)
        assert parser.parse_args().number == WANTED
        """
    command.write("mine/__init__.py", "")
    command.write("mine/__main__.py", body.replace("WANTED", 'int(os.environ["LOCAL_RANK"])'))
    command.write("mine/given.py", body.replace("WANTED", "9"))
    for words in (("mine",), ("mine.given", "--local-rank", "9")):
        done = command.run("--device", "cpu", "-n", "2", "-m", *words)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("source", "option"),
    [
        ('p.add_argument("--local_rank", type=int)', "--local_rank"),
        ('p.add_argument("-l", "--local-rank", "--local_rank", type=int)', "--local-rank"),
        ('p.add_argument("--local_rank", action="store", type=int)', "--local_rank"),
        ('p.add_argument("--local_rank", action="store_true")', None),
        ('p.add_argument("--rank")  # not --local_rank', None),
        ('s = p.add_subparsers()\ns.add_parser("train").add_argument("--local_rank")', None),
        ('print("--local_rank")', None),
    ],
)
def test_only_what_a_parser_takes_is_passed(source: str, option: str | None) -> None:
    assert local_rank_option_in(source.encode()) == option


def test_arguments_that_the_command_passes_are_kept() -> None:
    assert passes_local_rank(["train", "--local_rank", "3"])
    assert passes_local_rank(["--local-rank=3"])
    assert not passes_local_rank(["--local_rank_of_others=3", "local_rank"])


def test_processes_that_a_script_spawns_meet_where_it_says(command: Command) -> None:
    command.write("train.py", SPAWN)
    done = command.run("--device", "cpu", "-n", "1", "train.py")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", FAILING)
def test_a_known_failure_says_what_to_write(command: Command, name: str) -> None:
    ranks, source, advice = FAILING[name]
    path = command.write("train.py", source)
    path.write_text("import torch\nimport torch.distributed as dist\n" + path.read_text(), encoding="utf-8")
    done = command.run("--device", "cpu", "-n", str(ranks), "train.py")
    assert done.returncode == 1, done.stderr
    *_, error, last = done.stderr.splitlines()
    assert last.startswith("[rankwise] what to write instead: ")
    assert advice in last
    assert not error.startswith("[rankwise]")


def test_a_torch_with_nccl_on_a_machine_without_gpus() -> None:
    words = "ProcessGroupNCCL is only supported with GPUs, no GPUs found!"
    assert advice_for(words) == advice_for("Distributed package doesn't have NCCL built in")
    assert advice_for("Found no NVIDIA driver on your system.") == advice_for("Torch not compiled with CUDA enabled")


def test_errors_that_already_name_the_cause_are_unchanged() -> None:
    assert advice_for("CUDA error: an illegal memory access was encountered") is None
    assert advice_for("Port 5 is taken (EADDRINUSE).\n  do        give another port") is None


def test_a_model_that_is_freed_after_its_group_was_destroyed_keeps_no_rank_from_ending(command: Command) -> None:
    # Threads of gloo that want the interpreter's lock right after backward do not get it until the model is freed.
    command.write(
        "train.py",
        """
        import sys
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        def train():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            model = DistributedDataParallel(torch.nn.Linear(3, 3))
            model(torch.ones(2, 3)).sum().backward()
            dist.destroy_process_group()

        sys.setswitchinterval(60)
        for _ in range(60):
            train()
        print("trained")
        """,
    )
    ended = command.run("-n", "2", "train.py")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == ["trained"] * 2


def test_one_world_after_another_finds_its_own_ranks(command: Command) -> None:
    command.write(
        "train.py",
        """
        import torch
        import torch.distributed as dist

        for number in range(3):
            dist.init_process_group("gloo")
            total = torch.tensor([dist.get_rank() + number])
            dist.all_reduce(total)
            dist.destroy_process_group()
        print(total.item())
        """,
    )
    ended = command.run("-n", "2", "train.py")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == ["5"] * 2


LEFT_OPEN = """
import atexit, sys
import torch
import torch.distributed as dist

destroy = dist.destroy_process_group
dist.destroy_process_group = lambda: (print("destroyed"), destroy())
dist.init_process_group("gloo")

def last_words():
    total = torch.ones(1)
    dist.all_reduce(total)
    print(total.item())

atexit.register(last_words)
if {fails}:
    raise ValueError("of the script")
"""


def test_a_group_that_the_script_has_left_open_is_closed_after_its_own_exit_handlers(command: Command) -> None:
    command.write("train.py", LEFT_OPEN.format(fails=False))
    done = command.run("-n", "2", "train.py")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["2.0", "2.0", "destroyed", "destroyed"]


def test_a_group_of_a_script_that_has_failed_is_left_open(command: Command) -> None:
    command.write("train.py", LEFT_OPEN.replace("atexit.register(last_words)", "").format(fails=True))
    done = command.run("-n", "2", "train.py")
    assert done.returncode == 1
    assert done.stdout == ""
