# SPDX-License-Identifier: Apache-2.0
"""Several hosts on one machine: Linux network namespaces, joined by a switch in a namespace of its own.

Each host has its own network (``eth0`` and ``lo``), hostname, ``/etc/hosts`` and ``/dev/shm``. Files, process numbers
and the clock are those of the machine. Nothing is added to the machine's own network, so rigs never meet.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Self

from relay import TUN, Relay

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tests.warm import Running, Started, WarmPython

NAMESPACES = Path("/run/netns")
HOSTS_FILES = Path("/etc/netns")
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - one folder in it stands for each host's own
PACKAGES = {
    "ip": "iproute2",
    "tc": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "mount": "mount",
    "hostname": "hostname",
}
"""What the rig calls, and the Debian package it is in."""
NETWORK = "198.18.0"
"""From the range set aside for testing networks (RFC 2544). Only namespaces of one rig see it."""
PORT = 29500
BECOME_HOST = 'hostname "$1" && mount --bind "$2" /dev/shm && echo made && exec sleep infinity'
BURST_MILLISECONDS = 1
QUEUE_MILLISECONDS = 50
RELAY_QUEUE_PACKETS = 10_000
"""What waits in a card until the relay reads it. Such a card drops what it cannot hold."""


class HostsError(RuntimeError):
    """The hosts cannot be made on this machine."""


@dataclass(frozen=True)
class Ended:
    """How one rank ended."""

    exit_code: int | None
    """As ``subprocess`` has it; ``None`` where the rank ran past the limit and was killed."""
    stdout: str
    stderr: str


class Hosts:
    """A number of hosts that reach each other over one switch, for as long as the block lasts.

    Args:
        number: how many hosts.
        mbit: bandwidth of each link, in each direction; unlimited by default.
        delay_seconds: how long a packet is on its way from one host to another, beside what the bandwidth costs. The
            switch is a process then, see ``relay``, which is good for some 500 Mbit/s on two cores.
        own_name_is_loopback: whether each host's ``/etc/hosts`` has its own name as 127.0.1.1, as Debian's installer
            writes it, and its address only on the others.
        python: what commands of Python are forked from, where they would read the same variables at their start.
            Each is started afresh by default.
    """

    def __init__(
        self,
        number: int,
        *,
        mbit: float | None = None,
        delay_seconds: float = 0.0,
        own_name_is_loopback: bool = False,
        python: WarmPython | None = None,
    ) -> None:
        self.number = number
        self.mbit = mbit
        self.delay_seconds = delay_seconds
        self.own_name_is_loopback = own_name_is_loopback
        self.prefix = f"rankwise-{uuid.uuid4().hex[:8]}"
        self.hostnames = [f"host{index}" for index in range(number)]
        self.addresses = [f"{NETWORK}.{index + 1}" for index in range(number)]
        self.namespaces = [f"{self.prefix}-{name}" for name in self.hostnames]
        self._switch = f"{self.prefix}-switch"
        self._relay: Relay | None = None
        self._made = ExitStack()
        self._python = python
        self._inits: list[subprocess.Popen[str]] = []
        """For each host the process whose namespaces are the host's."""
        self._started: list[Started] = []

    def __enter__(self) -> Self:
        _check_machine(needs_tun=bool(self.delay_seconds))
        try:
            self._make_switch()
            for index in range(self.number):
                self._make_host(index)
            self._connect()
        except BaseException:
            self._made.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with self._made:
            for process in self._started:
                process.kill()
            for process in self._started:
                with process:
                    pass

    def start(
        self,
        host_index: int,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        stdout: IO[str] | int | None = None,
        stderr: IO[str] | int | None = None,
    ) -> Started:
        """Start a command on a host, with ``env`` on top of this process's environment.

        The process number is that of the command itself: what stands before it gives its place to it.
        """
        process = self._forked(host_index, argv, env or {}, stdout, stderr) or subprocess.Popen(
            ["nsenter", f"--target={self._inits[host_index].pid}", "--net", "--uts", "--mount", *argv],
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            text=True,
        )
        self._started.append(process)
        return process

    def _forked(
        self,
        host_index: int,
        argv: Sequence[str],
        env: Mapping[str, str],
        stdout: IO[str] | int | None,
        stderr: IO[str] | int | None,
    ) -> Running | None:
        if self._python is None or argv[0] != sys.executable:
            return None
        environment = {**self._python.environment, **env}
        if not self._python.can_start(environment):
            return None
        beside = self._inits[host_index].pid
        return self._python.start(argv[1:], Path.cwd(), environment, stdout=stdout, stderr=stderr, beside=beside)

    def link(self, host_index: int, *, up: bool) -> None:
        """Pull the host's cable out of the switch, or put it back."""
        if self._relay is not None:
            self._relay.link(host_index, up=up)
        else:
            _run("ip", "-n", self._switch, "link", "set", self.hostnames[host_index], "up" if up else "down")

    def kill_all(self, host_index: int) -> None:
        """Kill every process on a host, which can start others."""
        _kill_processes(self.namespaces[host_index], but=self._inits[host_index].pid)

    def limit(self, host_index: int, mbit: float) -> None:
        """Hold what one host sends to a bandwidth; what it receives comes as fast as before."""
        _limit(self.namespaces[host_index], "eth0", mbit)

    def lose(self, host_index: int, one_in: int) -> None:
        """Lose one in so many packets that one host sends. Only hosts with a delay can."""
        if self._relay is None:
            raise HostsError("Packets are lost by the relay, which is there if hosts have a delay.")
        self._relay.lose(host_index, one_in)

    def run_ranks(
        self,
        script: Path | str,
        ranks_per_host: int | Sequence[int],
        *arguments: str,
        env: Mapping[str, str] | None = None,
        timeout_seconds: float = 80.0,
    ) -> list[Ended]:
        """Run ranks on every host to their end, as a launcher of ``env://`` variables would.

        Args:
            script: a file, or Python code as a string.
            ranks_per_host: one number for all hosts, or one for each.
            arguments: the script's arguments.
            env: more variables.
            timeout_seconds: after which ranks that still run are killed.

        Returns:
            How each rank ended, in rank order.
        """
        counts = [ranks_per_host] * self.number if isinstance(ranks_per_host, int) else ranks_per_host
        argv = [sys.executable, *(["-c", script] if isinstance(script, str) else [str(script)]), *arguments]
        places = []
        for host, count in zip(range(self.number), counts, strict=True):
            places += [(host, local) for local in range(count)]
        deadline = time.monotonic() + timeout_seconds
        with tempfile.TemporaryDirectory(prefix="rankwise-hosts-") as folder, ExitStack() as files:
            ranks = []
            for rank, (host, local) in enumerate(places):
                variables = {
                    "MASTER_ADDR": self.addresses[0],
                    "MASTER_PORT": str(PORT),
                    "RANK": str(rank),
                    "WORLD_SIZE": str(len(places)),
                    "LOCAL_RANK": str(local),
                    "LOCAL_WORLD_SIZE": str(counts[host]),
                    "OMP_NUM_THREADS": "1",
                    **(env or {}),
                }
                # A pipe that is read only in the end would stop a rank that says much.
                out, err = (Path(folder) / f"{rank}.{stream}" for stream in ("out", "err"))
                stdout, stderr = (files.enter_context(path.open("w", encoding="utf-8")) for path in (out, err))
                ranks.append((self.start(host, argv, variables, stdout=stdout, stderr=stderr), out, err))
            return [_end(process, deadline, out, err) for process, out, err in ranks]

    def _make_switch(self) -> None:
        self._make_namespace(self._switch)
        if not self.delay_seconds:
            _run("ip", "-n", self._switch, "link", "add", "switch", "type", "bridge")
            _run("ip", "-n", self._switch, "link", "set", "switch", "up")

    def _make_host(self, index: int) -> None:
        namespace = self.namespaces[index]
        for folder in (HOSTS_FILES / namespace, SHARED_MEMORY / namespace):
            self._made.callback(shutil.rmtree, folder, ignore_errors=True)
            folder.mkdir(parents=True)
        known = list(self.addresses)
        if self.own_name_is_loopback:
            known[index] = "127.0.1.1"
        lines = [f"{address} {name}\n" for address, name in zip(known, self.hostnames, strict=True)]
        hosts_file = HOSTS_FILES / namespace / "hosts"
        hosts_file.write_text("".join(["127.0.0.1 localhost\n", *lines]), encoding="utf-8")
        self._make_namespace(namespace)
        become = ["unshare", "--uts", "sh", "-c", BECOME_HOST, "sh", self.hostnames[index]]
        init = subprocess.Popen(
            ["ip", "netns", "exec", namespace, *become, str(SHARED_MEMORY / namespace)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._inits.append(init)
        self._made.callback(_kill, init)
        assert init.stdout is not None
        if init.stdout.readline() != "made\n":
            raise HostsError(f"{namespace} cannot be entered.")

    def _connect(self) -> None:
        """Give every host its card, with the other end on the switch."""
        on_switch = ("ip", "-n", self._switch)
        if self.delay_seconds:
            queue_seconds = QUEUE_MILLISECONDS / 1000
            relay = Relay(self._switch, self.addresses, self.delay_seconds, self.mbit, queue_seconds)
            self._relay = self._made.enter_context(relay)
        for index, (namespace, port) in enumerate(zip(self.namespaces, self.hostnames, strict=True)):
            on_host = ("ip", "-n", namespace)
            if self._relay is not None:
                _run(*on_switch, "link", "set", f"card{index}", "netns", namespace, "name", "eth0")
                _run(*on_host, "link", "set", "eth0", "txqueuelen", str(RELAY_QUEUE_PACKETS))
            else:
                _run(*on_switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", namespace)
                _run(*on_switch, "link", "set", port, "master", "switch", "up")
            _run(*on_host, "address", "add", f"{self.addresses[index]}/24", "dev", "eth0")
            _run(*on_host, "link", "set", "eth0", "up")
            _run(*on_host, "link", "set", "lo", "up")
            if self.mbit is not None:
                _limit(namespace, "eth0", self.mbit)
            if self.mbit is not None and self._relay is None:
                _limit(self._switch, port, self.mbit)

    def _make_namespace(self, namespace: str) -> None:
        # Asked for first: an interruption may come between the making and the next line.
        self._made.callback(_delete_namespace, namespace)
        _run("ip", "netns", "add", namespace)


def _check_machine(*, needs_tun: bool) -> None:
    """Name what this machine lacks, all at once."""
    missing = [] if os.geteuid() == 0 else ["root, who may make network namespaces (sudo make multihost)"]
    missing += [f"{name} (Debian's {package})" for name, package in PACKAGES.items() if not shutil.which(name)]
    missing += [f"{TUN} (modprobe tun)"] if needs_tun and not TUN.exists() else []
    if missing:
        raise HostsError("The hosts of tests/multihost cannot be made. Missing: " + ", ".join(missing) + ".")


def _run(*argv: str) -> None:
    done = subprocess.run(argv, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise HostsError(f"{' '.join(argv)} failed: {done.stderr.strip()}")


def _limit(namespace: str, interface: str, mbit: float) -> None:
    """Hold what leaves through an interface to a bandwidth."""
    burst_bytes = max(int(mbit * 1e6 / 8 * BURST_MILLISECONDS / 1000), 2000)
    limit = ("rate", f"{mbit}mbit", "burst", str(burst_bytes), "latency", f"{QUEUE_MILLISECONDS}ms")
    _run("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", "tbf", *limit)


def _kill(process: subprocess.Popen[str]) -> None:
    with process:
        process.kill()


def _end(process: Started, deadline: float, out: Path, err: Path) -> Ended:
    try:
        exit_code = process.wait(max(deadline - time.monotonic(), 0))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        exit_code = None
    return Ended(exit_code, out.read_text(encoding="utf-8"), err.read_text(encoding="utf-8"))


def _delete_namespace(namespace: str) -> None:
    """End the processes inside, then the namespace; its interfaces go with it."""
    if not (NAMESPACES / namespace).exists():
        return
    _kill_processes(namespace)
    _run("ip", "netns", "delete", namespace)


def _kill_processes(namespace: str, but: int | None = None) -> None:
    """Kill every process inside a namespace, except one, and those that they start meanwhile."""
    while handles := list(_processes_in(namespace, but)):
        for handle in handles:
            with os.fdopen(handle) as ending:
                # It may have ended by itself.
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
                select.select([ending], [], [])


def _processes_in(namespace: str, but: int | None) -> Iterator[int]:
    """Return an open handle of every process inside a namespace, except one.

    A handle means one process for good; a number may be given to another while it is looked at.
    """
    inside = (NAMESPACES / namespace).stat()
    for entry in Path("/proc").glob("[0-9]*"):
        if entry.name == str(but):
            continue
        # A process may end while it is looked at; one that has ended shows no namespace.
        with contextlib.suppress(OSError), ExitStack() as unless_inside:
            handle = os.pidfd_open(int(entry.name))
            unless_inside.callback(os.close, handle)
            network = (entry / "ns" / "net").stat()
            if (network.st_dev, network.st_ino) == (inside.st_dev, inside.st_ino):
                unless_inside.pop_all()
                yield handle
