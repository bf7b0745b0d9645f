# SPDX-License-Identifier: Apache-2.0
"""The commands of the task files of docs/skypilot-dstack.md, on two hosts, with the variables that the makers document.

The files fit the schema of SkyPilot 0.14.1 and the parser of dstack 0.22.5, which are too large to install here.
"""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import interrupted
import pytest
import yaml
from hosts import Hosts
from interrupted import check_resumed

import rankwise

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parents[2]
PAGES = ("docs/skypilot-dstack.md", "docs/zh/skypilot-dstack.md")
NUM_RANKS = 2
"""One on each host, which has no GPU."""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(2) as made:
        yield made


def commands() -> dict[str, str]:
    """Return what each task runs on a machine, without its set-up."""
    skypilot, dstack = map(yaml.safe_load, re.findall(r"```yaml\n(.*?)```", (ROOT / PAGES[0]).read_text(), re.DOTALL))
    return {"skypilot": skypilot["run"], "dstack": dstack["commands"][-1]}


def skypilot(node_rank: int, addresses: list[str]) -> dict[str, str]:
    numbers = {"NUM_NODES": "2", "NODE_RANK": str(node_rank), "NUM_GPUS_PER_NODE": "0"}
    return {f"SKYPILOT_{name}": value for name, value in (numbers | {"NODE_IPS": "\n".join(addresses)}).items()}


def dstack(node_rank: int, addresses: list[str]) -> dict[str, str]:
    numbers = {"NODES_NUM": "2", "NODE_RANK": str(node_rank), "GPUS_PER_NODE": "0", "GPUS_NUM": "0"}
    where = {"MASTER_NODE_IP": addresses[0], "NODES_IPS": "\n".join(addresses)}
    return {f"DSTACK_{name}": value for name, value in (numbers | where).items()}


@pytest.mark.parametrize("variables", [skypilot, dstack])
def test_a_task_on_two_machines_trains_as_one_rank(
    hosts: Hosts, tmp_path: Path, variables: Callable[[int, list[str]], dict[str, str]]
) -> None:
    (tmp_path / "hurry").touch()
    # The file names the command and the script by their names alone.
    run = f'rankwise() {{ {shlex.quote(sys.executable)} -m rankwise "$@"; }}\n{commands()[variables.__name__]}'
    run = run.replace("train.py", shlex.join([interrupted.__file__, str(tmp_path)]))
    own = {"PYTHONPATH": str(Path(rankwise.__file__).parents[1]), "RANKWISE_SECRET": "of this test"}
    with (tmp_path / "said").open("w") as file:
        machines = [
            hosts.start(host, ["bash", "-ec", run], variables(host, hosts.addresses) | own, stdout=file, stderr=file)
            for host in range(2)
        ]
        assert [machine.wait(60) for machine in machines] == [0, 0], (tmp_path / "said").read_text()
    check_resumed(tmp_path, NUM_RANKS)
