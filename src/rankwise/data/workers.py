# SPDX-License-Identifier: Apache-2.0
"""Reading in worker processes: torch's DataLoader, given whole batches to read instead of samples.

Decides no order and no shares. A worker's error is returned as a value and raised in the rank, with its cause.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import shutil
import signal
import threading
from contextlib import suppress
from functools import partial
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from rankwise.data.sources import FetchedBatch, MapSource, StreamSource
from rankwise.errors import ConfigurationError, DatasetError
from rankwise.health.fork_safety import threads_are_known
from rankwise.health.traceback_folds import formatted, lines_of
from rankwise.torch_private.processes import end_workers, forget_iterator, show_worker, workers_of
from rankwise.world.environments.process import shows_all_frames

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rankwise.data.shards import BatchRequest

_END_SECONDS = 5.0
"""How long a worker may take to exit when asked; torch waits as long before it terminates it."""
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - its size is shown
_SHARED_MEMORY_IS_FULL = re.compile(r"shared memory\(shm\)|</torch_\w+>: No space left on device")
_MORE_SHARED_MEMORY = (
    f"give {_SHARED_MEMORY} more room: docker run --shm-size=8g ... (or --ipc=host), in Kubernetes an emptyDir with "
    f"medium: Memory at {_SHARED_MEMORY}; or read with fewer or no workers (num_workers=0)"
)
_ENOUGH_BYTES = 2**30
_MOST_LINES = 4
"""How many of the user's lines an error of a worker lists, innermost last."""


class WorkerOptions(NamedTuple):
    """How many workers, and how they are run; the names are torch's."""

    num_workers: int
    prefetch_factor: int | None
    persistent_workers: bool
    pin_memory: bool
    timeout_seconds: float
    worker_init_fn: Callable[[int], None] | None
    multiprocessing_context: Any

    def check(self) -> None:
        """Raise for invalid options, and for those that need workers if there are none.

        Raises:
            ConfigurationError: see above.
        """
        if not isinstance(self.num_workers, Integral) or self.num_workers < 0:
            raise ConfigurationError(
                f"num_workers must be at least 0, got {self.num_workers!r}.",
                do="pass 0 to read in this process, or a positive number",
            )
        for name in ("prefetch_factor", "persistent_workers", "worker_init_fn"):
            if getattr(self, name) and self.num_workers == 0:
                raise ConfigurationError(
                    f"{name} is for worker processes, but num_workers=0.",
                    do="pass num_workers=1 or more, or leave it out",
                )
        if not isinstance(self.prefetch_factor, Integral | None):
            raise ConfigurationError(
                f"prefetch_factor must be a whole number, got {self.prefetch_factor!r}.",
                do="leave it out, or pass prefetch_factor=2",
            )
        if not isinstance(self.timeout_seconds, Real):
            raise ConfigurationError(
                f"timeout_seconds must be a number of seconds, got {self.timeout_seconds!r}.",
                do="leave it out, or pass timeout_seconds=600",
            )
        if self.worker_init_fn is not None and not callable(self.worker_init_fn):
            raise ConfigurationError(
                f"worker_init_fn must be a function of the worker's number, got {self.worker_init_fn!r}.",
                do="pass the function itself: worker_init_fn=begin",
            )
        methods = multiprocessing.get_all_start_methods()
        if isinstance(self.multiprocessing_context, str) and self.multiprocessing_context not in methods:
            raise ConfigurationError(
                f"Unknown multiprocessing_context={self.multiprocessing_context!r}.",
                do="use one of " + ", ".join(methods),
            )


class WorkerFailure(NamedTuple):
    """A :class:`DatasetError` sent from a worker to its rank."""

    what: str
    where: str | None
    evidence: str
    """The error's own, then the user's lines in the worker."""
    do: str | None
    cause: bytes
    """The exception that caused it, pickled; empty if it cannot be."""

    def error(self) -> DatasetError:
        """Return the error as it was raised in the worker."""
        error = DatasetError(self.what, where=self.where, evidence=self.evidence, do=self.do)
        if self.cause:
            error.__cause__ = pickle.loads(self.cause)  # noqa: S301 - from a worker of this process
        return error


def failure_of(error: DatasetError) -> WorkerFailure:
    """Return ``error`` as a value that can always be sent to another process."""
    cause = error.__cause__ or error
    try:
        pickled = pickle.dumps(cause)
        pickle.loads(pickled)  # noqa: S301 - an exception may pickle well and fail to unpickle
    except Exception:  # noqa: BLE001 - any object may fail in any way here
        pickled = b""
    trace = formatted(cause).rstrip()
    is_chained = cause.__cause__ is not None or (cause.__context__ is not None and not cause.__suppress_context__)
    if not (shows_all_frames() or is_chained or getattr(cause, "__notes__", ())):
        lines = ", which called ".join(f"{line} in {function}" for line, function in lines_of(cause)[-_MOST_LINES:])
        trace = f"raised in a loader worker, at {lines}"
    evidence = f"{error.evidence}\n{trace}" if error.evidence else trace
    return WorkerFailure(error.what, error.where, evidence, error.do, pickled)


class _ReadsRequests(Dataset[FetchedBatch | WorkerFailure]):
    """A dataset for torch, whose indices are requests and whose samples are batches."""

    def __init__(self, source: MapSource) -> None:
        self._source = source

    def __getitem__(self, request: BatchRequest) -> FetchedBatch | WorkerFailure:
        try:
            return FetchedBatch(request.stop, self._source.fetch(request))
        except DatasetError as error:
            return failure_of(error)


class _ReadsStream(IterableDataset[FetchedBatch | WorkerFailure]):
    """An iterable dataset for torch, whose items are batches; each of k workers reads every k-th."""

    def __init__(self, stream: StreamSource) -> None:
        self._stream = stream
        # Shared, because persistent workers were forked before later epochs began.
        self.start = torch.zeros(2, dtype=torch.int64).share_memory_()

    def __iter__(self) -> Iterator[FetchedBatch | WorkerFailure]:
        worker = get_worker_info()
        epoch, position = self.start.tolist()
        number, num_workers = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        batches = self._stream.batches(epoch, position, number, num_workers)
        while True:
            # Every worker needs the whole stream: a dataset that divides itself must see no worker.
            show_worker(None)
            try:
                fetched = next(batches, None)
            except DatasetError as error:
                yield failure_of(error)
                return
            finally:
                show_worker(worker)
            if fetched is None:
                return
            yield fetched


class _Requests:
    """The requests of the current epoch, in the place of torch's sampler."""

    def __init__(self) -> None:
        self.of_epoch: Iterator[BatchRequest] = iter(())

    def __iter__(self) -> Iterator[BatchRequest]:
        return self.of_epoch


class Workers:
    """The worker processes of one loader. They start with the first requested batch."""

    def __init__(
        self, source: MapSource | StreamSource, options: WorkerOptions, where: str, stop_signals: Sequence[str] = ()
    ) -> None:
        self._where = where
        self._requests = _Requests()
        self._stream = _ReadsStream(source) if isinstance(source, StreamSource) else None
        reader = _ReadsRequests(source) if not isinstance(source, StreamSource) else self._stream
        self._loader: TorchDataLoader[Any] = TorchDataLoader(
            reader,  # type: ignore[arg-type] # one of the two
            batch_size=None,
            sampler=None if self._stream is not None else self._requests,
            num_workers=options.num_workers,
            collate_fn=_as_it_is,
            pin_memory=options.pin_memory,
            timeout=options.timeout_seconds,
            worker_init_fn=partial(_begin, stop_signals, options.worker_init_fn),
            multiprocessing_context=options.multiprocessing_context or _default_start(),
            # A separate one, so that starting workers draws nothing from the training loop's generator.
            generator=torch.Generator(),
            prefetch_factor=options.prefetch_factor,
            persistent_workers=options.persistent_workers,
        )

    def read(self, requests: Iterator[BatchRequest]) -> Iterator[FetchedBatch]:
        """Yield the batch read for each request, in order.

        Raises:
            DatasetError: reading failed, a worker died, or none answered in time.
        """
        self._requests.of_epoch = requests
        return self._fetched()

    def read_stream(self, epoch: int, position: int) -> Iterator[FetchedBatch]:
        """Yield a stream's batches from ``position`` of ``epoch`` on; raises as :meth:`read`."""
        if self._stream is not None:
            self._stream.start.copy_(torch.tensor([epoch, position]))
        return self._fetched()

    def _fetched(self) -> Iterator[FetchedBatch]:
        try:
            with threads_are_known():
                answers = iter(self._loader)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            if "pickle" not in f"{type(error).__name__} {error}".lower():
                raise
            raise DatasetError(
                "The workers of the loader could not start: what they need cannot be pickled.",
                where=self._where,
                evidence=f"{type(error).__name__}: {error}",
                do="define the dataset's classes and functions at the top of a module, without lambda; "
                'or leave multiprocessing_context= out, or pass "fork"',
            ) from error
        while True:
            try:
                answer = next(answers, None)
            except Exception as error:
                raise _unanswered(error, self._end(answers), self._where) from error
            if answer is None:
                return
            if isinstance(answer, WorkerFailure):
                # Now: code that keeps the error would otherwise keep the workers with it.
                self._end(answers)
                error = answer.error()
                if _SHARED_MEMORY_IS_FULL.search(error.what):
                    error.supplement(evidence=f"{_shared_memory()}\n{error.evidence}", do=_MORE_SHARED_MEMORY)
                raise error
            try:
                yield answer
            except DatasetError:
                # Thrown in by the consumer of the batch. The error keeps frames, and those would keep the workers.
                self._end(answers)
                raise

    def _end(self, answers: Iterator[Any]) -> dict[int, int]:
        # Persistent workers that have exited must not be asked again.
        forget_iterator(self._loader)
        return _end_workers(answers)


def _unanswered(error: Exception, exit_codes: dict[int, int], where: str) -> DatasetError:
    """Return the error for a missing answer: a worker has exited by itself, or all took too long.

    Torch's ``error`` often reports only a broken pipe.
    """
    if exit_codes:
        what = "A worker process of the loader exited before it had read its batch."
        ends = [f"worker {number} exited with code {code}" + _signal_name(code) for number, code in exit_codes.items()]
        evidence = "\n".join(ends)
        if -signal.SIGKILL in exit_codes.values():
            do = "check dmesg for the kernel's out-of-memory killer; a smaller num_workers= needs less memory"
        elif -signal.SIGBUS in exit_codes.values():
            evidence += f"\n{_shared_memory()}"
            do = _MORE_SHARED_MEMORY
        elif min(exit_codes.values()) < 0:
            do = "num_workers=0 with PYTHONFAULTHANDLER=1 shows the crash where it happens"
        else:
            do = "sys.exit() and os._exit() in dataset[i], collate_fn or worker_init_fn end the worker: raise instead"
    else:
        what = "The worker processes of the loader did not answer in time, or could not start."
        evidence = f"{type(error).__name__}: {error}"
        do = "timeout_seconds= sets the limit for one batch; num_workers=0 shows where reading blocks (rankwise stacks)"
        if Path(_SHARED_MEMORY).is_dir() and shutil.disk_usage(_SHARED_MEMORY).total < _ENOUGH_BYTES:
            evidence += f"\n{_shared_memory()}: a batch that finds no room there never arrives"
            do += f"; {_MORE_SHARED_MEMORY}"
    return DatasetError(what, where=where, evidence=evidence, do=do)


def _shared_memory() -> str:
    """Return the size of the memory that workers pass batches through."""
    total, _, free = (size // 2**20 for size in shutil.disk_usage(_SHARED_MEMORY))
    return f"{_SHARED_MEMORY}, which batches of workers pass through, has {total} MiB, {free} free"


def _end_workers(answers: Iterator[Any]) -> dict[int, int]:
    """End the workers, and return the exit codes of those that exited by themselves.

    Torch's handler of SIGCHLD raises wherever the process is: waiting for the workers makes it raise here, and not
    later in the training loop.
    """
    with suppress(RuntimeError):
        end_workers(answers)
    exit_codes: dict[int, int] = {}
    for number, process in enumerate(workers_of(answers)):
        process.join(_END_SECONDS)
        if process.exitcode not in (0, None, -signal.SIGTERM):
            exit_codes[number] = process.exitcode
    return exit_codes


def _signal_name(exit_code: int) -> str:
    names = [f" ({name.name})" for name in signal.Signals if name == -exit_code]
    return names[0] if names else ""


def _begin(stop_signals: Sequence[str], users: Callable[[int], None] | None, number: int) -> None:
    """Initialize a worker. Slurm sends a stop signal to every process, but a worker must continue to read.

    SIGTERM from its rank ends it, as torch expects.
    """
    for name in stop_signals:
        if name == "SIGTERM":
            # Only a waiting thread learns the sender. A spawned worker has other threads too, and exits.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            threading.Thread(target=_exit_on_sigterm_of_rank, name="rankwise-worker", daemon=True).start()
        else:
            signal.signal(signal.Signals[name], signal.SIG_IGN)
    if users is not None:
        users(number)


def _exit_on_sigterm_of_rank() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)


def _default_start() -> str | None:
    """Return ``"fork"`` where it exists: workers start at once and share the dataset's memory.

    Python's own default differs in ranks that a fork server started, and everywhere from Python 3.14 on.
    """
    return "fork" if "fork" in multiprocessing.get_all_start_methods() else None


def _as_it_is(fetched: Any) -> Any:
    return fetched
