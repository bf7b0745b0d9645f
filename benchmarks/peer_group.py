# SPDX-License-Identifier: Apache-2.0
"""A library's two ranks, as separate processes that follow commands and otherwise wait in the kernel."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch.distributed as dist

if TYPE_CHECKING:
    from types import TracebackType

NUM_RANKS = 2
START_SECONDS = 180
ANSWER_SECONDS = 120
END_SECONDS = 30
KILL_SECONDS = 5
SETTLE_SECONDS = 0.5
"""How long to wait for processes that were told to stop or to continue: they do not answer."""
LINES_OF_LOG = 30

ENVIRONMENT = {
    "PYTHONPATH": str(Path(__file__).parent),
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    # No library reports its use.
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


class GroupError(Exception):
    """A group that did not do what it was told."""


@dataclass(frozen=True)
class Side:
    """A library, and how its ranks come to be."""

    name: str
    module: str
    """Of ``peer_loops``."""
    distribution: str | None
    """What is installed, where anything has to be."""
    starts_ranks: bool = False
    """Whether the library starts them itself, from one process.

    It then has services too, which work while its ranks are idle: they are held while it is not its turn.
    """


class Group:
    """The ranks of one side, from the start of their processes to their end. Used as a context manager."""

    def __init__(self, side: Side, folder: Path) -> None:
        self.side = side
        self._log = folder / f"{side.module}.log"
        self._address = folder / side.module
        # Served from here, as torchrun does it: no port is chosen before it is taken.
        self._store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ranks: list[Connection] = []

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._end()
        finally:
            self._kill()

    def ask(self, method: str, *arguments: object, **options: object) -> list[Any]:
        """Have every rank call a method of its ``Rank`` and return the results, by rank."""
        self._let_services_work(b"+")
        results = self._asked(method, arguments, options)
        self._let_services_work(b"-")
        return results

    def _asked(self, method: str, arguments: tuple[object, ...], options: dict[str, object]) -> list[Any]:
        answers: dict[int, Any] = {}
        for number, connection in enumerate(self._ranks):
            try:
                connection.send((method, arguments, options))
            except ConnectionError:
                raise self._error(f"lost rank {number} before {method!r}") from None
        deadline = time.monotonic() + ANSWER_SECONDS
        while len(answers) < NUM_RANKS:
            pending = [rank for number, rank in enumerate(self._ranks) if number not in answers]
            ready = wait(pending, deadline - time.monotonic())
            if not ready:
                numbers = " and ".join(str(number) for number in range(NUM_RANKS) if number not in answers)
                raise self._error(f"did not answer {method!r} on rank {numbers} within {ANSWER_SECONDS} s")
            for connection in ready:
                number = self._ranks.index(connection)
                try:
                    is_done, answers[number] = connection.recv()
                except (EOFError, ConnectionError):
                    raise self._error(f"lost rank {number} in {method!r}") from None
                if not is_done:
                    raise self._error(f"failed on rank {number} in {method!r}:\n{answers[number]}")
        return [answers[number] for number in range(NUM_RANKS)]

    def _start(self) -> None:
        with socket.socket(socket.AF_UNIX) as listener, self._log.open("wb") as log:
            listener.bind(str(self._address))
            listener.listen(NUM_RANKS)
            for rank in range(1 if self.side.starts_ranks else NUM_RANKS):
                self._processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "peer_loops", self.side.module, str(self._address)],
                        env=os.environ | ENVIRONMENT | self._variables(rank),
                        stdin=subprocess.PIPE,  # its end is the end of the process, however this one ends
                        stdout=log,
                        stderr=log,
                        start_new_session=True,  # Ctrl-C is for the coordinator
                    )
                )
            by_number: dict[int, Connection] = {}
            deadline = time.monotonic() + START_SECONDS
            while len(by_number) < NUM_RANKS:
                self._await_start(listener, deadline)
                connection = Connection(listener.accept()[0].detach())
                self._ranks.append(connection)
                self._await_start(connection, deadline)
                by_number[connection.recv()] = connection
        self._ranks = [by_number[number] for number in range(NUM_RANKS)]
        self._let_services_work(b"-")

    def _let_services_work(self, word: bytes) -> None:
        """Release (``+``) or hold (``-``) what the library has started beside its ranks, and them."""
        if not self.side.starts_ranks:
            return
        for process in self._processes:
            if process.stdin is not None:
                try:
                    process.stdin.write(word)
                    process.stdin.flush()
                except BrokenPipeError:
                    raise self._error("ended before its time") from None
        time.sleep(SETTLE_SECONDS)

    def _variables(self, rank: int) -> dict[str, str]:
        """Return what torchrun tells a process, and where it may leave files."""
        variables = {"TMPDIR": str(self._address.parent)}
        if self.side.starts_ranks:
            return variables
        return variables | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(NUM_RANKS),
            "LOCAL_WORLD_SIZE": str(NUM_RANKS),
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_RUN_ID": self.side.module,
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }

    def _await_start(self, awaited: socket.socket | Connection, deadline: float) -> None:
        ends = [os.pidfd_open(process.pid) for process in self._processes]
        try:
            ready = wait([awaited, *ends], deadline - time.monotonic())
        finally:
            for end in ends:
                os.close(end)
        if awaited not in ready:
            raise self._error("ended while it started" if ready else f"did not start within {START_SECONDS} s")

    def _end(self) -> None:
        self._let_services_work(b"+")
        for connection in self._ranks:
            connection.send(None)
        deadline = time.monotonic() + END_SECONDS
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise self._error(f"did not end within {END_SECONDS} s") from None

    def _kill(self) -> None:
        for connection in self._ranks:
            connection.close()
        for process in self._processes:
            if process.stdin is not None:
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(KILL_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _error(self, what: str) -> GroupError:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-LINES_OF_LOG:]
        return GroupError("\n".join([f"{self.side.name} {what}", "the end of its output:", *lines]))
