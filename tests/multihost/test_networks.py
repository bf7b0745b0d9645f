# SPDX-License-Identifier: Apache-2.0
"""Ranks that find each other despite misleading names, and their errors if they cannot."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from hosts import PORT, SHARED_MEMORY, Hosts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.warm import WarmPython

TRAINING = Path(__file__).with_name("training.py")
JOIN_AND_LOOK = f"""
import json, os, subprocess, rankwise as rw, torch.distributed as dist
from rankwise.comm.session import current
with rw.join() as world:
    current().exchange.dup().barrier("a dup")
    dist.all_reduce(rw.all_reduce(__import__("torch").ones(1)), group=dist.new_group())
    sockets = subprocess.run(["ss", "-Htlnp"], capture_output=True, text=True, check=True).stdout.splitlines()
    own = {{line.split()[3] for line in sockets if f"pid={{os.getpid()}}," in line}}
    store = {{address for address in own if address.endswith(":{PORT}")}}
    print(json.dumps([sorted(store), sorted({{address.rsplit(":", 1)[0] for address in own - store}})]))
print([name for name in os.environ if "IFNAME" in name])
"""
DOCTOR = "import sys; from rankwise.cli import main; sys.exit(main(['doctor', *sys.argv[1:]]))"
JOIN_SOON = "import rankwise as rw; rw.join(timeout_seconds=2)"


@pytest.fixture
def debian_hosts(warm_python: WarmPython) -> Iterator[Hosts]:
    """Two hosts on which their own name is 127.0.1.1."""
    with Hosts(2, own_name_is_loopback=True, python=warm_python) as made:
        yield made


def listeners(said: str) -> tuple[list[str], list[str]]:
    """Return where a rank listened: for the store, and for its groups."""
    first, second = said.splitlines()
    assert second == "[]", "nothing stays set behind the world"
    store, groups = json.loads(first)
    return store, groups


def test_ranks_train_where_every_host_calls_itself_loopback(debian_hosts: Hosts, tmp_path: Path) -> None:
    """By name, as Slurm's list has it: on rank 0's host, the name of rank 0's host is loopback."""
    env = {"MASTER_ADDR": "host0"}
    all_ended = debian_hosts.run_ranks(TRAINING, 1, str(tmp_path), '{"exchange": "gloo"}', env=env)
    for ended in all_ended:
        assert ended.exit_code == 0, ended.stderr
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    torch.testing.assert_close(second, first, rtol=0, atol=0)
    assert f"port {PORT}: host0 resolves to 127.0.1.1 on this machine, but not on others" in all_ended[0].stderr


def test_ranks_listen_only_where_the_others_come_from(debian_hosts: Hosts) -> None:
    ranks = debian_hosts.run_ranks(JOIN_AND_LOOK, 1)
    for ended in ranks:
        assert ended.exit_code == 0, ended.stderr
    found = [listeners(ended.stdout) for ended in ranks]
    address, other = debian_hosts.addresses
    assert found == [([f"{address}:{PORT}"], [address]), ([], [other])]


def test_rank_zero_given_localhost_still_serves_the_others(debian_hosts: Hosts) -> None:
    """As an operator of Kubernetes sets it for the first pod."""
    code = "import os; os.environ.update({'MASTER_ADDR': 'localhost'} if os.environ['RANK'] == '0' else {})"
    first, second = debian_hosts.run_ranks(code + JOIN_AND_LOOK, 1)
    assert (first.exit_code, second.exit_code) == (0, 0), first.stderr + second.stderr
    address, other = debian_hosts.addresses
    assert [listeners(ended.stdout)[1] for ended in (first, second)] == [[address], [other]]
    assert f"listens on every interface, port {PORT}: localhost resolves to 127.0.0.1 on this machine" in first.stderr


def test_ranks_of_one_host_stay_on_loopback(debian_hosts: Hosts) -> None:
    ranks = debian_hosts.run_ranks(JOIN_AND_LOOK, [2, 0])
    for ended in ranks:
        assert ended.exit_code == 0, ended.stderr
        assert listeners(ended.stdout)[1] == ["127.0.0.1"]


def test_rank_zero_on_the_wrong_machine_says_so_at_once(debian_hosts: Hosts) -> None:
    variables = {"MASTER_ADDR": "198.18.0.2", "MASTER_PORT": str(PORT), "RANK": "0", "WORLD_SIZE": "2"}
    process = debian_hosts.start(0, [sys.executable, "-c", JOIN_SOON], variables, stderr=subprocess.PIPE)
    _, err = process.communicate()
    assert process.returncode == 1
    assert "serve the job's store at 198.18.0.2, which is not an address of its machine" in err
    assert "eth0: 198.18.0.1" in err
    assert "MASTER_ADDR=198.18.0.1" in err


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("host1", r"host1 resolves to the machine itself: 127\.0\.1\.1\n +/etc/hosts has: 127\.0\.1\.1 host1"),
        ("198.18.0.1", r"route: 198\.18\.0\.1 from 198\.18\.0\.2 through eth0"),
        ("10.1.2.3", r"This machine has no route to 10\.1\.2\.3, port 29500"),
        ("nowhere.invalid", r"This machine cannot resolve the host name 'nowhere\.invalid'"),
    ],
)
def test_a_rank_that_cannot_reach_the_store_says_what_it_tried(
    debian_hosts: Hosts, address: str, expected: str
) -> None:
    variables = {"MASTER_ADDR": address, "MASTER_PORT": str(PORT), "RANK": "1", "WORLD_SIZE": "2"}
    process = debian_hosts.start(1, [sys.executable, "-c", JOIN_SOON], variables, stderr=subprocess.PIPE)
    _, err = process.communicate()
    assert process.returncode == 1
    assert f"PeerMissing: The job's store at {address}, port {PORT}, could not be reached within 2 s." in err
    assert re.search(expected, err), err
    assert f"nc -vz {address} {PORT}" in err


def test_the_doctor_examines_both_hosts(debian_hosts: Hosts, tmp_path: Path) -> None:
    first, *others = debian_hosts.run_ranks(DOCTOR, [1, 2], "--json", "--shared", str(tmp_path))
    assert first.exit_code == 0, first.stderr + first.stdout
    assert [(other.exit_code, other.stdout) for other in others] == [(0, ""), (0, "")]
    read = json.loads(first.stdout)
    assert [facts["machine"]["hostname"] for facts in read["ranks"]] == ["host0", "host1", "host1"]
    assert {facts["across"]["store_route"]["interface"] for facts in read["ranks"]} == {"eth0"}
    assert [facts["across"]["routes"].get("host0", {}).get("local_address") for facts in read["ranks"]] == [
        None,
        debian_hosts.addresses[1],
        None,
    ]
    # One clock for all hosts here: what is found must be within what the measurement may be off by.
    clock = read["ranks"][1]["across"]
    assert abs(clock["clock_ahead_seconds"]) <= clock["clock_error_seconds"] < 1
    assert [timing["num_bytes"] for timing in read["timings"]][:2] == [4096, 2**20]
    found = {finding["check"]: (finding["level"], finding["what"]) for finding in read["findings"]}
    assert found["own name"] == ("warning", "host1 resolves its own name to 127.0.1.1, which others cannot reach")
    assert found["clocks"][0] == found["shared folder"][0] == found["network"][0] == "ok"
    assert not [finding for finding in read["findings"] if finding["level"] == "error"]
    assert list(tmp_path.iterdir()) == [], "the shared file is gone"


def test_the_doctor_names_a_host_that_does_not_share_a_folder(debian_hosts: Hosts) -> None:
    first, _ = debian_hosts.run_ranks(DOCTOR, 1, "--shared", str(SHARED_MEMORY))
    assert first.exit_code == 1
    assert (
        "error    shared folder  host1 does not share /dev/shm with rank 0: No such file or directory" in first.stdout
    )
    assert "do: on host1: findmnt -T /dev/shm" in first.stdout


def test_the_doctor_names_a_rank_that_never_comes(debian_hosts: Hosts) -> None:
    code = "import os, sys; os.environ['RANK'] == '1' and sys.exit(); " + DOCTOR
    first, _, third = debian_hosts.run_ranks(code, [1, 2], "--timeout", "2")
    assert (first.exit_code, third.exit_code, third.stdout) == (1, 0, ""), third.stderr
    assert "error    join        join() timed out after 2 s waiting for rank 1." in first.stdout


def test_an_interface_that_is_not_there_is_named(debian_hosts: Hosts) -> None:
    for ended in debian_hosts.run_ranks(JOIN_SOON, 1, env={"GLOO_SOCKET_IFNAME": "ib7"}):
        assert ended.exit_code == 1
        assert "GLOO_SOCKET_IFNAME names ib7, which is not an interface of this machine." in ended.stderr
