# SPDX-License-Identifier: Apache-2.0
"""A loader worker that is killed while its rank waits for the others: every rank's error names the worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.e2e.conftest import Command

SCRIPT = """
    import os, signal, time, torch, rankwise as rw
    from rankwise.health.collective_timeout import CollectiveWait

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, index):
            return os.getpid()

    def raise_error(*_):
        raise RuntimeError("told to go on without")

    check, begun = CollectiveWait.check, []

    def begin_and_check(self):
        if begun:
            begun.pop()()
        check(self)

    CollectiveWait.check = begin_and_check
    with rw.join(exchange="{exchange}") as world:
        signal.signal(signal.SIGALRM, raise_error)
        batches = iter(torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=1))
        victim = int(next(batches)[0])
        rw.barrier()
        if world.rank == 0:
            time.sleep(100)  # it never comes, and is ended by the launcher
        begun.append(lambda: {sends})
        rw.all_reduce(torch.ones(3))
"""


@pytest.mark.parametrize("exchange", ["auto", "gloo"])
@pytest.mark.parametrize(
    ("sends", "words"),
    [
        ("os.kill(victim, signal.SIGKILL)", "is killed by signal: Killed"),
        ("signal.setitimer(signal.ITIMER_REAL, 0.05)", "RuntimeError: told to go on without"),
    ],
)
def test_an_exception_of_a_signal_handler_is_not_mistaken_for_a_lost_connection(
    command: Command, sends: str, words: str, exchange: str
) -> None:
    command.write("train.py", SCRIPT.format(sends=sends, exchange=exchange))
    done = command.run("-n", "2", "train.py")
    assert done.returncode == 1, done.stderr
    assert words in done.stderr
    assert "onnection" not in done.stderr
