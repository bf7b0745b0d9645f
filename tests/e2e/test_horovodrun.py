# SPDX-License-Identifier: Apache-2.0
"""``rankwise horovodrun`` as a person of Horovod's uses it: the script is as it was."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import subprocess

    from conftest import Command

TRAIN = """
    import sys
    import torch
    import torch.nn.functional as F
    import horovod.torch as hvd
    from torch.utils.data import DataLoader, TensorDataset
    from torch.utils.data.distributed import DistributedSampler

    def main():
        hvd.init()
        torch.manual_seed(hvd.rank())
        x = torch.arange(24, dtype=torch.float64).reshape(12, 2) / 24
        sampler = DistributedSampler(TensorDataset(x), num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False)
        workers = {"num_workers": 1, "multiprocessing_context": "forkserver"} if "--workers" in sys.argv else {}
        loader = DataLoader(TensorDataset(x), batch_size=3, sampler=sampler, **workers)
        model = torch.nn.Linear(2, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size())
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        for (part,) in loader:
            optimizer.zero_grad()
            F.mse_loss(model(part), part.sum(1, keepdim=True)).backward()
            optimizer.step()
        weights = [hvd.allgather(weight.detach().reshape(1, -1)) for weight in model.parameters()]
        print(hvd.rank(), hvd.size(), sys.argv[1:], all((one == one[0]).all().item() for one in weights), flush=True)
        if "--fail" in sys.argv and hvd.rank() == 1:
            raise ValueError("of rank 1")
        hvd.barrier()

    if __name__ == "__main__":
        main()
"""


def horovodrun(command: Command, *words: str) -> subprocess.CompletedProcess[str]:
    return command.rankwise("horovodrun", *words)


@pytest.mark.parametrize("more", [[], ["--workers"]])
def test_a_script_of_horovods_runs_as_it_is(command: Command, more: list[str]) -> None:
    command.write("train.py", TRAIN)
    ended = horovodrun(command, "-np", "2", "-H", "localhost:2", "--cycle-time-ms", "3", "python", "train.py", *more)
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == [f"{rank} 2 {more} True" for rank in range(2)]
    assert "--cycle-time-ms has no effect" in ended.stderr
    told = re.search(r"equivalent command: rankwise (run .*)", ended.stderr)
    assert told is not None
    assert told[1] == " ".join(["run -n 2 -m rankwise.compat.horovod train.py", *more])


def test_the_exit_code_is_that_of_the_rank_that_failed(command: Command) -> None:
    command.write("train.py", TRAIN)
    ended = horovodrun(command, "-np", "2", "python", "train.py", "--fail")
    assert ended.returncode == 1, ended.stderr
    assert "ValueError: of rank 1" in ended.stderr


@pytest.mark.parametrize(
    ("library", "words"), [("horovod.torch", "rankwise horovodrun -np 4"), ("megengine", "rankwise.compat.megengine")]
)
def test_a_missing_library_has_its_own_error(command: Command, library: str, words: str) -> None:
    command.write("train.py", f"import {library}")
    ended = command.run("-n", "1", "train.py")
    assert ended.returncode == 1
    assert "ModuleNotFoundError" in ended.stderr
    assert words in ended.stderr.splitlines()[-1]


def test_horovods_variables_are_honoured_or_named(command: Command) -> None:
    command.write(
        "train.py",
        """
        import os
        import horovod.torch as hvd
        from rankwise.compat.horovod.queue import current_queue

        hvd.init()
        hvd.barrier()
        print(os.environ.get("GLOO_SOCKET_IFNAME"), current_queue().session.detector.timeout_seconds)
        """,
    )
    given = {
        "HOROVOD_CYCLE_TIME": "1",
        "HOROVOD_GLOO_IFACE": "lo",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "77",
    }

    def ended(**more: str) -> subprocess.CompletedProcess[str]:
        done = command.rankwise("horovodrun", "-np", "2", "python", "train.py", env={**given, **more})
        assert done.returncode == 0, done.stderr
        return done

    told = ended()
    assert told.stdout.splitlines() == ["lo 77.0"] * 2
    line = "without effect here: HOROVOD_CYCLE_TIME (docs/from-horovod.md, Variables)"
    assert told.stderr.count(line) == 1
    # Messages of ranks below the level are not printed; the launcher's are.
    assert "without effect" not in ended(HOROVOD_LOG_LEVEL="warning").stderr


WHO = """
    import json, os
    found = {name: value for name, value in os.environ.items() if name.startswith("HOROVOD_")}
    import horovod.torch as hvd
    hvd.init()
    told = (hvd.rank, hvd.size, hvd.local_rank, hvd.local_size, hvd.cross_rank, hvd.cross_size)
    assert found == {f"HOROVOD_{one.__name__.upper()}": str(one()) for one in told}, found
    print("rank", found["HOROVOD_RANK"], "of", found["HOROVOD_SIZE"], "attempt", os.environ["RANKWISE_ATTEMPT"])
    hvd.barrier()
    if os.environ["RANKWISE_ATTEMPT"] == "0" and hvd.rank() == 1:
        os._exit(3)
    hvd.barrier()
"""


def test_each_rank_has_horovodruns_variables_after_a_restart_too(command: Command) -> None:
    command.write("train.py", WHO)
    ended = horovodrun(command, "-np", "2", "--min-np", "2", "--reset-limit", "1", "python", "train.py")
    assert ended.returncode == 0, ended.stderr
    told = [f"rank {rank} of 2 attempt {attempt}" for attempt in range(2) for rank in range(2)]
    assert sorted(ended.stdout.splitlines()) == sorted(told)
