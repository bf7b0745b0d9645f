# SPDX-License-Identifier: Apache-2.0
"""``horovod.run(fn, np=2)`` as a script or notebook calls it."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import subprocess

    from conftest import Command

RUN = """
    import rankwise.compat.horovod.as_horovod
    import horovod
    import horovod.torch as hvd
    import torch

    print("the script runs once")
    scale = 10

    def train(start, *, lr):
        hvd.init()
        total = hvd.allreduce(torch.tensor([start + hvd.rank()]), op=hvd.Sum, name="total")
        import horovod.torch as again
        return hvd.rank(), hvd.size(), scale * lr, total.item(), again is hvd is horovod.torch

    for value in horovod.run(train, args=(5,), kwargs={"lr": 2}, num_proc=2, hosts="localhost:4", use_gloo=True):
        print(value)
"""
FAIL = """
    import rankwise.compat.horovod as hvd

    def train():
        hvd.init()
        if hvd.rank() == 1:
            raise KeyError("of rank 1")
        hvd.barrier()

    try:
        hvd.run(train, num_proc=2)
    except KeyError as error:
        print(repr(error), any("in train" in note for note in error.__notes__))
"""
ELASTIC = """
    import os
    import rankwise.compat.horovod as hvd

    def train():
        hvd.init()
        state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, step=0, log=[])

        @hvd.elastic.run
        def loop(state):
            while state.step < 4:
                state.step += 1
                state.log = state.log + [os.environ["RANKWISE_ATTEMPT"]]
                state.commit()
                if state.step == 2 and os.environ["RANKWISE_ATTEMPT"] == "0":
                    hvd.barrier()  # rank 0 writes the commit: the end of rank 1 would end it before it has
                    os._exit(9)
            return state.step, state.log

        return loop(state)

    print(hvd.run(train, num_proc=2, min_num_proc=2))
"""


def python(command: Command, text: str) -> subprocess.CompletedProcess[str]:
    """Run a script as ``python -W error`` does from its first line on; what it starts gets that option too."""
    strictly = "import sys, warnings\nwarnings.simplefilter('error')\nsys.warnoptions.append('error')\n"
    command.write("train.py", strictly + textwrap.dedent(text))
    return command.python("train.py", env={"OMP_NUM_THREADS": "1"})


def test_it_returns_every_ranks_value_in_rank_order(command: Command) -> None:
    ended = python(command, RUN)
    assert ended.returncode == 0, ended.stderr
    values = [f"({rank}, 2, 20, 11, True)" for rank in range(2)]
    assert ended.stdout.splitlines() == ["the script runs once", *values]
    assert "hvd.run(): without effect here: use_gloo" in ended.stderr


def test_it_raises_what_the_rank_raised(command: Command) -> None:
    ended = python(command, FAIL)
    assert ended.stdout == "KeyError('of rank 1') True\n", ended.stderr


def test_an_elastic_job_restarts_from_its_commit(command: Command) -> None:
    ended = python(command, ELASTIC)
    expected = (4, ["0", "0", "1", "1"])
    assert ended.stdout == f"{[expected, expected]}\n", ended.stderr


def test_a_module_of_the_scripts_is_imported_by_ranks_under_its_own_name(command: Command) -> None:
    command.write("steps.py", "import horovod.torch as hvd\ndef rank():\n    hvd.init()\n    return hvd.rank()\n")
    ended = python(
        command,
        """
        from rankwise.compat.horovod import provide
        provide()
        from horovod import run
        import steps
        print(run(steps.rank, num_proc=2))
        """,
    )
    assert ended.stdout == "[0, 1]\n", ended.stderr
