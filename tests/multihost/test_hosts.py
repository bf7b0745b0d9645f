# SPDX-License-Identifier: Apache-2.0
"""The hosts themselves: separate from each other and from the machine, and gone afterwards."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from hosts import HOSTS_FILES, NAMESPACES, PORT, SHARED_MEMORY, Hosts, HostsError

if TYPE_CHECKING:
    from pathlib import Path

    from tests.warm import WarmPython

READ_WHERE_I_AM = """
import json, os, pathlib, socket
print(json.dumps({
    "hostname": socket.gethostname(),
    "addresses": [socket.gethostbyname(name) for name in ("host0", "host1", "localhost")],
    "interfaces": sorted(name for _, name in socket.if_nameindex() if name in {"eth0", "lo"}),
    "shared_memory": sorted(path.name for path in pathlib.Path("/dev/shm").iterdir()),
}))
"""
LEAVE_A_PROCESS = """
import subprocess
print(subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, start_new_session=True).pid)
"""
SERVE = f"""
import socket
with socket.create_server(("", {PORT})) as server:
    print("ready", flush=True)
    connection, (address, _) = server.accept()
    print(address, connection.recv(9).decode())
"""
CALL = f"import socket; socket.create_connection(('host0', {PORT})).sendall(b'hello')"
EXCHANGE_TENSORS = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.zeros(250_000))
dist.destroy_process_group()
"""
NUM_BYTES = 8 * 2**20
CARD = "/sys/class/net/eth0"
# Each byte comes back; what is more than one byte at a time is only read, until the other side has no more.
ECHO = f"""
import socket, threading
def serve(connection):
    while got := connection.recv(1 << 20):
        if len(got) == 1:
            connection.sendall(got)
    connection.sendall(b"all")
with socket.create_server(("", {PORT})) as server:
    print("ready", flush=True)
    while True:
        threading.Thread(target=serve, args=server.accept()[:1], daemon=True).start()
"""
ASK = f"""
import socket, sys, time
with socket.create_connection(("host0", {PORT})) as connection:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    started = time.monotonic()
    connection.sendall(b"1")
    connection.recv(1)
    print(time.monotonic() - started, flush=True)
    open(sys.argv[1]).read()
    connection.sendall(b"2")
    connection.settimeout(0.3)
    try:
        print(connection.recv(1), flush=True)
    except TimeoutError:
        print("silence", flush=True)
    connection.settimeout(None)
    print(connection.recv(1), flush=True)
"""
SEND = f"""
import socket
with socket.create_connection(("host0", {PORT})) as connection:
    connection.sendall(bytes({NUM_BYTES}))
    connection.shutdown(socket.SHUT_WR)
    connection.recv(3)
"""


def traces(hosts: Hosts) -> list[str]:
    """Return what the machine has of these hosts."""
    folders = [folder for folder in (NAMESPACES, HOSTS_FILES, SHARED_MEMORY) if folder.exists()]
    return [str(path) for folder in folders for path in folder.iterdir() if path.name.startswith(hosts.prefix)]


def output_of(hosts: Hosts, host_index: int, *argv: str) -> str:
    """Run a command on a host to its end and return what it said."""
    stdout, _ = hosts.start(host_index, argv, stdout=subprocess.PIPE).communicate()
    return stdout.strip()


@pytest.mark.parametrize("start", ["afresh", "forked"])
def test_each_host_has_its_own_name_network_and_shared_memory(warm_python: WarmPython, start: str) -> None:
    with Hosts(2, python=warm_python if start == "forked" else None) as hosts:
        _each_has_its_own(hosts)


def _each_has_its_own(hosts: Hosts) -> None:
    assert output_of(hosts, 1, "touch", str(SHARED_MEMORY / "of_host1")) == ""
    for index, shared_memory in enumerate([[], ["of_host1"]]):
        found = json.loads(output_of(hosts, index, sys.executable, "-c", READ_WHERE_I_AM))
        assert found == {
            "hostname": f"host{index}",
            "addresses": [*hosts.addresses, "127.0.0.1"],
            "interfaces": ["eth0", "lo"],
            "shared_memory": shared_memory,
        }


def test_hosts_reach_each_other_by_name(hosts: Hosts) -> None:
    server = hosts.start(0, [sys.executable, "-c", SERVE], stdout=subprocess.PIPE)
    assert server.stdout is not None
    assert server.stdout.readline() == "ready\n"
    assert hosts.start(1, [sys.executable, "-c", CALL]).wait() == 0
    assert server.stdout.readline() == f"{hosts.addresses[1]} hello\n"


def test_two_rigs_at_a_time_do_not_meet(hosts: Hosts) -> None:
    with Hosts(2) as others:
        for each in (hosts, others):
            server = each.start(0, [sys.executable, "-c", SERVE], stdout=subprocess.PIPE)
            assert server.stdout is not None
            assert server.stdout.readline() == "ready\n", "the port is free on each"


def test_a_cut_link_carries_nothing_until_it_is_restored(hosts: Hosts) -> None:
    carrier = ("cat", f"{CARD}/carrier")
    hosts.link(1, up=False)
    assert [output_of(hosts, index, *carrier) for index in (0, 1)] == ["1", "0"]
    hosts.link(1, up=True)
    assert [output_of(hosts, index, *carrier) for index in (0, 1)] == ["1", "1"]


def test_a_bandwidth_holds_packets_back(warm_python: WarmPython) -> None:
    with Hosts(2, mbit=100, python=warm_python) as hosts:
        for ended in hosts.run_ranks(EXCHANGE_TENSORS, 1):
            assert ended.exit_code == 0, ended.stderr
        for index in range(2):
            (limit,) = json.loads(output_of(hosts, index, "tc", "-s", "-j", "qdisc", "show", "dev", "eth0"))
            assert limit["kind"] == "tbf"
            assert limit["overlimits"] > 0


def test_packets_of_a_slow_network_take_their_time_and_wait_for_a_cut_link_to_heal(tmp_path: Path) -> None:
    delay_seconds, mbit, cut_now = 0.03, 100, tmp_path / "cut now"
    os.mkfifo(cut_now)
    with Hosts(3, mbit=mbit, delay_seconds=delay_seconds) as hosts:
        assert len(traces(hosts)) == 10, "a process is the switch, and leaves no more than the other one"
        server = hosts.start(0, [sys.executable, "-c", ECHO], stdout=subprocess.PIPE)
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        client = hosts.start(1, [sys.executable, "-c", ASK, str(cut_now)], stdout=subprocess.PIPE)
        assert client.stdout is not None
        assert float(client.stdout.readline()) >= 2 * delay_seconds
        carrier, received = ("cat", f"{CARD}/carrier"), ("cat", f"{CARD}/statistics/rx_packets")
        hosts.link(0, up=False)
        assert [output_of(hosts, index, *carrier) for index in range(3)] == ["0", "1", "1"]
        before = output_of(hosts, 0, *received)
        cut_now.write_text("")
        assert client.stdout.readline() == "silence\n"
        assert output_of(hosts, 0, *received) == before
        hosts.link(0, up=True)
        assert client.stdout.readline() == "b'2'\n", "the connection has lived on"
        started = time.monotonic()
        senders = [hosts.start(index, [sys.executable, "-c", SEND]) for index in (1, 2)]
        assert [sender.wait() for sender in senders] == [0, 0]
        assert time.monotonic() - started >= 2 * NUM_BYTES * 8 / (mbit * 1e6), (
            "what two hosts send to one is one link's"
        )
    assert traces(hosts) == []


def test_ranks_are_numbered_host_by_host_and_say_how_they_end(hosts: Hosts) -> None:
    code = "import os, sys; print(*[os.environ[n] for n in sys.argv[1:]]); sys.exit(os.environ['RANK'])"
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MORE"]
    ended = hosts.run_ranks(code, [1, 2], *names, env={"MORE": "yes"})
    assert [rank.stdout.split() for rank in ended] == [
        ["0", "3", "0", "1", hosts.addresses[0], "yes"],
        ["1", "3", "0", "2", hosts.addresses[0], "yes"],
        ["2", "3", "1", "2", hosts.addresses[0], "yes"],
    ]
    assert [rank.stderr for rank in ended] == ["0\n", "1\n", "2\n"]
    assert [rank.exit_code for rank in ended] == [1, 1, 1]


def test_a_rank_past_the_limit_is_killed(hosts: Hosts) -> None:
    stays = hosts.run_ranks("import time; time.sleep(600)", 1, timeout_seconds=1)
    assert [rank.exit_code for rank in stays] == [None, None]


def test_nothing_is_left_of_hosts_with_processes_on_them() -> None:
    with Hosts(2) as hosts:
        running = hosts.start(0, ["sleep", "600"])
        orphan = int(output_of(hosts, 1, sys.executable, "-c", LEAVE_A_PROCESS))
        ended = os.pidfd_open(orphan)
        assert len(traces(hosts)) == 7, "a switch, and for each host a namespace and two folders"
    assert running.returncode is not None
    with os.fdopen(ended):
        assert select.select([ended], [], [], 0)[0], "the orphan has ended too"
    assert traces(hosts) == []


def test_nothing_is_left_of_hosts_half_made() -> None:
    hosts = Hosts(2)
    hosts.addresses[1] = "nowhere"
    with pytest.raises(HostsError, match=r"ip .*address add nowhere/24 dev eth0 failed: .*nowhere"), hosts:
        pass
    assert traces(hosts) == []


def test_programs_that_the_machine_lacks_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("hosts.TUN", tmp_path / "tun")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("PATH", "")
    said = r"Missing: root.*, ip \(Debian's iproute2\), tc \(.*\), .*tun \(modprobe tun\)\.$"
    with pytest.raises(HostsError, match=said), Hosts(2, delay_seconds=1):
        pass
