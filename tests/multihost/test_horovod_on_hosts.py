# SPDX-License-Identifier: Apache-2.0
"""A Horovod script on hosts of different sizes: horovodrun's variables say what its calls say."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import rankwise

if TYPE_CHECKING:
    from hosts import Hosts

    from tests.warm import Started

SCRIPT = """
import os
found = {name: value for name, value in os.environ.items() if name.startswith("HOROVOD_")}
import horovod.torch as hvd
hvd.init()
told = (hvd.rank, hvd.size, hvd.local_rank, hvd.local_size, hvd.cross_rank, hvd.cross_size)
assert found == {f"HOROVOD_{one.__name__.upper()}": str(one()) for one in told}, found
with open(f"rank-{hvd.rank()}", "w") as file:
    file.write(" ".join(str(one()) for one in told))
"""


def test_ranks_of_uneven_hosts_have_horovodruns_variables(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    env = {"PYTHONPATH": str(Path(rankwise.__file__).parents[1]), "RANKWISE_SECRET": "a", "OMP_NUM_THREADS": "1"}
    processes: list[Started] = []
    for host, num_ranks in enumerate((2, 1)):
        # What `rankwise horovodrun -np 3 -H host0:2,host1:1` starts there.
        meeting = ("--nodes", "2", "--node-rank", str(host), "--rendezvous", f"{hosts.addresses[0]}:29400")
        run = (sys.executable, "-m", "rankwise", "run", "-n", str(num_ranks), *meeting)
        words = ("env", "-C", str(tmp_path), *run, "-m", "rankwise.compat.horovod", "train.py")
        with (tmp_path / f"host{host}").open("w") as said:
            processes.append(hosts.start(host, words, env, stdout=said, stderr=said))
    codes = [process.wait(50) for process in processes]
    assert codes == [0, 0], "".join((tmp_path / f"host{host}").read_text() for host in range(2))
    told = [(tmp_path / f"rank-{rank}").read_text() for rank in range(3)]
    assert told == ["0 3 0 2 0 2", "1 3 1 2 0 1", "2 3 0 1 1 2"]
