# SPDX-License-Identifier: Apache-2.0
"""Run a function on real ranks, and kill one of them: for rankwise's tests and for users' tests."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

import torch

from rankwise.comm.join import join
from rankwise.errors import ConfigurationError
from rankwise.health import process_probe

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.process import BaseProcess

RANK_EXIT_SECONDS = 3.0
"""How long ranks may take to exit by themselves after the last result."""


@dataclass(frozen=True, slots=True)
class RankResult:
    """The outcome of one rank: a value, or an error."""

    value: Any
    error: BaseException | None
    exit_code: int | None
    seconds: float

    def get(self) -> Any:
        """Return the value, or raise the rank's error."""
        if self.error is not None:
            raise self.error
        return self.value


class RankDied(RuntimeError):
    """A rank's process exited without a result."""


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: object,
    exchange: str = "auto",
    device: str | None = "cpu",
    backend: str | None = None,
    timeout_seconds: float = 60.0,
    join_timeout_seconds: float = 30.0,
) -> list[RankResult]:
    """Run ``fn(world, *args)`` on real ranks of this machine and return the outcome of each.

    Each rank is a separate process with one torch thread that has joined a world.

    Args:
        fn: a module-level function; the world is its first argument.
        world_size: number of ranks.
        args: picklable; passed on.
        exchange: how tensors travel, as for :func:`rankwise.join`.
        device: of every rank, as for :func:`rankwise.join`; ``None`` gives each a GPU of its own where there are GPUs.
        backend: as for :func:`rankwise.join`; ``"gloo"`` lets several ranks share one GPU.
        timeout_seconds: after which every rank is killed; its result is then a :class:`RankDied` that says where it
            was.
        join_timeout_seconds: the limit of each collective, as for :func:`rankwise.join`.

    Returns:
        One result per rank, in rank order.
    """
    if world_size < 1:
        raise ConfigurationError(f"world_size must be >= 1, got {world_size}.", do="pass world_size >= 1")
    options = {"backend": backend, "device": device, "exchange": exchange, "timeout_seconds": join_timeout_seconds}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rankwise.testing", "numpy"])
    with tempfile.TemporaryDirectory(prefix="rankwise-ranks-") as folder:
        started = time.monotonic()
        processes: list[BaseProcess] = []
        pipes: list[Any] = []
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            place = {"init_method": f"file://{folder}/store", "rank": rank, "world_size": world_size}
            process = context.Process(
                target=_run_rank,
                args=(fn, args, options | place if world_size > 1 else options, _stack_file(folder, rank), sender),
                name=f"rank-{rank}",
            )
            process.start()
            sender.close()
            processes.append(process)
            pipes.append(receiver)
        try:
            return _collect(processes, pipes, started, timeout_seconds, folder)
        finally:
            _end(processes)


def _collect(
    processes: list[BaseProcess], pipes: list[Connection], started: float, timeout_seconds: float, folder: str
) -> list[RankResult]:
    results: dict[int, RankResult] = {}
    rank_of = {pipe: rank for rank, pipe in enumerate(pipes)}
    while len(results) < len(processes):
        left = started + timeout_seconds - time.monotonic()
        ready = wait([pipe for pipe, rank in rank_of.items() if rank not in results], max(left, 0))
        seconds = time.monotonic() - started
        if not ready:
            for rank in set(rank_of.values()) - set(results):
                where = _where(processes[rank], _stack_file(folder, rank))
                died = RankDied(f"rank {rank} was still running after {timeout_seconds:.0f} s, {where}")
                results[rank] = RankResult(None, died, None, seconds)
        for pipe in ready:
            rank = rank_of[pipe]  # type: ignore[index]
            results[rank] = _result(rank, pipe, processes[rank], seconds)  # type: ignore[arg-type]
    return [results[rank] for rank in range(len(processes))]


def _stack_file(folder: str, rank: int) -> str:
    return f"{folder}/stack-{rank}"


def _where(process: BaseProcess, stack_file: str) -> str:
    """Return the stack of a rank that has not ended, innermost frame last, or what keeps it from writing one."""
    pid = process.pid or 0
    stack = process_probe.stack_of(pid, stack_file)
    return "\n  ".join(["at", *stack]) if stack else process_probe.state_of(pid)


def _result(rank: int, pipe: Connection, process: BaseProcess, seconds: float) -> RankResult:
    try:
        value, error = pickle.loads(pipe.recv_bytes())  # noqa: S301 - from a process of ours
    except EOFError:
        process.join(5)
        died = RankDied(f"rank {rank} exited without a result, exit code {process.exitcode}")
        return RankResult(None, died, process.exitcode, seconds)
    return RankResult(value, error, process.exitcode, seconds)


def _end(processes: list[BaseProcess]) -> None:
    deadline = time.monotonic() + RANK_EXIT_SECONDS
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0))
        if process.is_alive():
            process.kill()
            process.join()
        process.close()


def _run_rank(
    fn: Callable[..., Any], args: tuple[object, ...], options: dict[str, Any], stack_file: str, sender: Connection
) -> None:
    torch.set_num_threads(1)
    process_probe.offer_stack(stack_file)
    value, error = None, None
    try:
        with join(**options) as world:
            value = fn(world, *args)
    except BaseException as caught:  # noqa: BLE001 - the caller gets it
        error = caught
        caught.add_note("".join(traceback.format_exception(caught)))
    sender.send_bytes(_pickled(value, error))
    sender.close()
    sys.stdout.flush()
    sys.stderr.flush()
    if error is not None:
        # Collectives of a broken group may be in flight; a normal exit would wait for them.
        os._exit(1)


def _pickled(value: object, error: BaseException | None) -> bytes:
    try:
        return pickle.dumps((value, error))
    except Exception as problem:  # noqa: BLE001 - any refusal to be pickled
        return pickle.dumps((None, RankDied(f"the rank's result cannot be pickled: {problem}: {error!r}")))


def kill_self() -> None:
    """End this rank as ``kill -9`` does: no handler runs, nothing is flushed."""
    os.kill(os.getpid(), signal.SIGKILL)
