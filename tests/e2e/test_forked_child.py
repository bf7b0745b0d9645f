# SPDX-License-Identifier: Apache-2.0
"""A process that a rank forks is not a rank: it ends on its own and does not join collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.e2e.conftest import Command

SCRIPT = """
    import os, sys, traceback, torch, rankwise as rw

    def child():
        {child}

    with rw.join(exchange="{exchange}") as world:
        assert rw.all_reduce(1) == 2
        pid = os.fork()
        if pid == 0:
            child()
            sys.exit(3)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert rw.all_reduce(torch.ones(3) * (world.rank + 1)).tolist() == [3, 3, 3]
        print(f"rank {{world.rank}}: the child ended with {{code}}")
"""


@pytest.mark.parametrize("exchange", ["auto", "gloo"])
@pytest.mark.parametrize(
    ("child", "code", "words"),
    [
        ("sys.exit(0)", 0, ""),
        ("raise ValueError('in the child')", 1, "ValueError: in the child"),
        ("rw.all_reduce(1)", 1, "This process was forked from rank 1 and is not a rank itself."),
        ("rw.leave(); sys.exit(7)", 7, ""),
    ],
)
def test_a_forked_child_ends_by_itself(command: Command, child: str, code: int, words: str, exchange: str) -> None:
    command.write("train.py", SCRIPT.format(child=child, exchange=exchange))
    done = command.run("-n", "2", "train.py")
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert f"rank {rank}: the child ended with {code}" in done.stdout
    assert words in done.stderr
