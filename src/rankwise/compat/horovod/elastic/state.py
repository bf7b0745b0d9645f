# SPDX-License-Identifier: Apache-2.0
"""State that is kept across a failure: ``State``, ``ObjectState`` for plain values, ``TorchState`` for a training.

Commits of a state outlive a rank's process: files in the launcher's temporary folder, written once per machine. The
folder is private to this user and is removed when the launcher exits, so commits are not synced to disk: that would
help only after a power loss, which ends the launcher too. Files are read without running code.
"""

from __future__ import annotations

import _codecs
import copy
import io
import itertools
import pickle
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from rankwise.checkpoint.folder import staged_file
from rankwise.comm import collectives
from rankwise.comm.session import current, current_or_none
from rankwise.compat.horovod.elastic.sampler import ElasticSampler
from rankwise.compat.horovod.initialization import rank
from rankwise.compat.horovod.objects_and_state import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from rankwise.errors import CheckpointError, ConfigurationError, fold_values
from rankwise.log import log, warn
from rankwise.world.environments.process import read_process, stack_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

NUM_KEPT = 2
"""The newest, and the one before it in case the newest is damaged."""
_OF_NUMPY: list[Any] = [
    np.ndarray,
    np.dtype,
    *(type(np.dtype(code)) for code in "?bhilqBHILQefdgFDG"),
    np.float64(0).__reduce__()[0],
    np.empty(0).__reduce__()[0],
    _codecs.encode,
]
"""The functions that read back numbers and arrays of NumPy; none of them runs code from a file."""
_NAME = re.compile(r"elastic-(\d+)-(\d+)-(\d+)\.pt")


class CommitNumber(NamedTuple):
    """Identifies a commit of a state; later attempts have the newer commits."""

    attempt: int
    number: int


class Commits:
    """The commits of one state, from its :func:`run` on, in the folder of this machine's part of the job.

    ``run`` numbers the calls of ``elastic.run`` in this process, alike on every rank and in every attempt.
    """

    def __init__(self, folder: Path, *, run: int, attempt: int, is_writer: bool) -> None:
        self._folder = folder
        self._run = run
        self._attempt = attempt
        self._is_writer = is_writer
        self._num_written = 0

    @property
    def is_later_attempt(self) -> bool:
        """Whether an earlier attempt of this job may have written commits."""
        return self._attempt > 0

    def write(self, kept: dict[str, Any] | None) -> None:
        """Write a commit completely or not at all. Called by: every rank; one per machine writes."""
        self._num_written += 1
        if kept is None or not self._is_writer:
            return
        path = self._folder / f"elastic-{self._run}-{self._attempt}-{self._num_written}.pt"
        try:
            with staged_file(path, durable=False) as staging:
                _save(kept, staging, is_first=self._num_written == 1)
        except (OSError, RuntimeError) as error:
            raise CheckpointError(
                f"The elastic state cannot be committed to {self._folder}: {error}",
                do="make room there, or set TMPDIR to another folder before `rankwise run`",
            ) from error
        for old in self._found()[NUM_KEPT:]:
            self._path(old).unlink(missing_ok=True)

    def take_newest(self) -> dict[str, Any] | None:
        """Return the newest undamaged commit of all machines; ``None`` if there is none.

        Called by: every rank, at the start of an attempt that is not the first.

        Raises:
            CheckpointError: there are commits, and all are damaged, or the newest cannot be read; on every rank.
        """
        own, unread, text = self._newest_readable() if self._is_writer else (None, None, "")
        reported = collectives.gather_json([None if own is None else own[0], unread, text], what="hvd.elastic.run()")
        marks = {rank: CommitNumber(*mark) for rank, (mark, _, _) in enumerate(reported) if mark is not None}
        newest = max(marks.values(), default=None)
        lost = {
            rank: text
            for rank, (_, unread, text) in enumerate(reported)
            if text and (newest is None or (unread is not None and CommitNumber(*unread) > newest))
        }
        if lost:
            raise CheckpointError(
                "This attempt cannot continue from the elastic state that an earlier one has committed.",
                evidence=fold_values(lost),
                do="check the disk of the job's temporary folder, and start the job again; "
                "TMPDIR=... rankwise run puts the folder on another disk",
            )
        if not marks:
            return None
        # If several ranks have it, the lowest one sends it.
        source = max(marks, key=lambda rank: (marks[rank], -rank))
        log(f"elastic: commit {marks[source].number} of attempt {marks[source].attempt} is restored from rank {source}")
        data = own[1] if own is not None and source == current().world.rank else b""
        return _loaded(collectives.broadcast_object(data, source))

    def _newest_readable(self) -> tuple[tuple[CommitNumber, bytes] | None, CommitNumber | None, str]:
        """Return this machine's newest undamaged commit, the newest that cannot be read, and the reasons."""
        unread: CommitNumber | None = None
        reasons: list[str] = []
        for mark in self._found():
            try:
                data = self._path(mark).read_bytes()
                _loaded(data)
            except Exception as error:  # noqa: BLE001 - torch raises many kinds for a damaged file
                reasons.append(f"{self._path(mark)}: {str(error).partition(chr(10))[0]}")
                warn(f"the elastic commit {reasons[-1].replace(': ', ' is skipped: ', 1)}", all_ranks=True)
                unread = unread or (mark if isinstance(error, OSError) else None)
                continue
            return (mark, data), unread, "\n".join(reasons)
        return None, unread, "\n".join(reasons)

    def _found(self) -> list[CommitNumber]:
        """Return the commits of this run that the folder holds, the newest first."""
        names = [_NAME.fullmatch(path.name) for path in self._folder.iterdir()]
        marks = [CommitNumber(int(name[2]), int(name[3])) for name in names if name and int(name[1]) == self._run]
        return sorted(marks, reverse=True)

    def _path(self, mark: CommitNumber) -> Path:
        return self._folder / f"elastic-{self._run}-{mark.attempt}-{mark.number}.pt"


_run_numbers = itertools.count()


def open_commits() -> Commits | None:
    """Return the commits of the next ``elastic.run``; ``None`` if no launcher would restart this job.

    Called by: every rank, once for each ``elastic.run``.
    """
    run = next(_run_numbers)
    in_folder_of_job = stack_file()
    if not in_folder_of_job:
        return None
    attempt = int(read_process().attempt)
    is_writer = current().world.local_rank == 0
    return Commits(Path(in_folder_of_job).parent, run=run, attempt=attempt, is_writer=is_writer)


def _loaded(data: bytes) -> dict[str, Any]:
    # Tensors are loaded on the CPU; load_state_dict() copies them to the model's device.
    with safe_globals(_OF_NUMPY):
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _save(kept: dict[str, Any], path: Path, *, is_first: bool) -> None:
    """Write a commit; raise a ConfigurationError if it cannot be read back without running code."""
    try:
        torch.save(kept, path)
        with safe_globals(_OF_NUMPY):
            found = get_unsafe_globals_in_checkpoint(path)
        if not found and is_first:
            _loaded(path.read_bytes())  # once: later commits hold the same types
    except (pickle.PickleError, AttributeError, TypeError) as error:
        found = [str(error).partition("\n")[0]]
    if found:
        raise ConfigurationError(
            "The elastic state contains objects that cannot be read back without running code.",
            evidence="\n".join(sorted(found)),
            do="keep tensors, arrays, numbers, strings, and lists, sets and dicts of them; for a class of your own, "
            "keep its fields, or allow it with torch.serialization.add_safe_globals([Class])",
        )


class State:
    """The state that :func:`run` returns to after a failure. Base class: a subclass can save, restore and sync.

    Args:
        bcast_object: gives every rank rank 0's object; ``hvd.broadcast_object``.
        get_rank: returns this rank; ``hvd.rank``.
    """

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._reset_callbacks: list[Callable[[], object]] = []
        self._commits: Commits | None = None
        self._num_commits = 0

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], object]]) -> None:
        """Register functions to call when training continues after a failure, or with other machines."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call :meth:`reset`, then the registered functions."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Save the state so that it outlives this process, and check whether machines have joined.

        Called by: every rank, at the same place of the loop.

        Under ``rankwise run`` one rank of each machine writes it into the job's temporary folder, which is removed
        with the job; a later attempt of the job continues from there. Elsewhere it is kept in memory.

        Raises:
            ConfigurationError: the state holds an object that cannot be read back without running code.
            CheckpointError: it could not be written.
            SystemExit: as :meth:`check_host_updates`.
        """
        self.save()
        self._num_commits += 1
        if self._commits is not None:
            self._commits.write(self.kept())
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Commit and end this attempt if machines have joined, or if the job was asked to stop.

        Called by: every rank, at the same place of the loop. Costs nothing otherwise.

        Raises:
            SystemExit: with 75. The launcher restarts all ranks, with the machine that has joined, and :func:`run`
                restores the state; a job that was asked to stop ends.
        """
        session = current_or_none()
        if session is not None and session.preemption.is_here():
            self.save()
            if self._commits is not None:
                self._commits.write(self.kept())
            log("elastic: committed for the next attempt of this job; removed when the job ends")
            session.preemption.stop()

    def save(self) -> None:
        """Keep a copy of the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Return to the copy that was saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give every rank the state of rank 0. Called by: every rank."""
        raise NotImplementedError

    def reset(self) -> None:
        """Run before the registered functions; does nothing by default."""

    def kept(self) -> dict[str, Any] | None:
        """Return the saved copy, for another process to continue from; ``None`` to keep it in memory only."""
        return None

    def take(self, kept: dict[str, Any]) -> None:
        """Restore what :meth:`kept` returned in another process."""

    @property
    def num_commits(self) -> int:
        """The number of times this process has committed it."""
        return self._num_commits

    def commit_to(self, commits: Commits | None) -> None:
        """Choose where commits are written; ``None`` keeps them in memory. Called by :func:`run`."""
        self._commits = commits


class ObjectState(State):
    """Plain Python values, each an attribute of that name.

    Args:
        bcast_object: gives every rank rank 0's object; ``hvd.broadcast_object``.
        get_rank: returns this rank; ``hvd.rank``.
        kwargs: the values. They are kept by reference, not copied.
    """

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int], **kwargs: object) -> None:
        self._saved_state: dict[str, Any] = dict(kwargs)
        self._set_attributes()
        super().__init__(bcast_object=bcast_object, get_rank=get_rank)

    def save(self) -> None:
        """Save the values of the attributes."""
        self._saved_state = {name: getattr(self, name) for name in self._saved_state}

    def restore(self) -> None:
        """Set the attributes to the saved values."""
        self._set_attributes()

    def sync(self) -> None:
        """Set the attributes to the saved values of rank 0. Called by: every rank."""
        if self._saved_state:
            self._saved_state = self._bcast_object(self._saved_state)
            self._set_attributes()

    def kept(self) -> dict[str, Any] | None:
        """Return the saved values."""
        return {"values": self._saved_state}

    def take(self, kept: dict[str, Any]) -> None:
        """Set the attributes to the saved values of another process."""
        self._saved_state = {**self._saved_state, **kept["values"]}
        self._set_attributes()

    def _set_attributes(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, value)


class StateHandler:
    """Saves, restores and synchronizes one value of a :class:`TorchState`. Subclass it for types of your own.

    Args:
        value: the value.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Keep a copy of the value's state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Return to the copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give every rank the value of rank 0. Called by: every rank."""
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Replace the value."""
        self.value = value
        self.save()

    def kept(self) -> dict[str, Any] | None:
        """Return the copy, for another process to continue from; ``None`` to keep it in memory only."""
        return None

    def take(self, kept: dict[str, Any]) -> None:
        """Restore what :meth:`kept` returned in another process."""


class _ByStateDict(StateHandler):
    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self._saved: dict[str, Any] = {}
        _ByStateDict.save(self)

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        self.value.load_state_dict(self._saved)

    def kept(self) -> dict[str, Any] | None:
        return self._saved

    def take(self, kept: dict[str, Any]) -> None:
        self._saved = kept
        self.restore()


class ModelStateHandler(_ByStateDict):
    """Handles a model."""

    def sync(self) -> None:
        """Broadcast parameters and buffers. Called by: every rank."""
        broadcast_parameters(self.value.state_dict(), root_rank=0)


class OptimizerStateHandler(_ByStateDict):
    """Handles an optimizer."""

    def sync(self) -> None:
        """Broadcast state and options. Called by: every rank."""
        broadcast_optimizer_state(self.value, root_rank=0)


class SamplerStateHandler(_ByStateDict):
    """Handles an :class:`ElasticSampler`."""

    def sync(self) -> None:
        """Broadcast its position, and divide the remaining samples. Called by: every rank."""
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))


_handlers: list[tuple[type, type[StateHandler]]] = [
    (nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """Return pairs of a type and its handler; the first that matches is used."""
    return _handlers


def set_handler_registry(registry: list[tuple[type, type[StateHandler]]]) -> None:
    """Replace the pairs of types and handlers."""
    _handlers[:] = registry


class TorchState(ObjectState):
    """The state of a training: each argument is an attribute of that name.

    Args:
        model: a model.
        optimizer: its optimizer.
        kwargs: more models, optimizers, :class:`ElasticSampler`; and plain values, such as ``epoch=0``.
    """

    _by_name: dict[str, StateHandler] = {}  # noqa: RUF012 - for what is set before an instance has its own

    def __init__(
        self, model: nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: object
    ) -> None:
        by_name: dict[str, StateHandler] = {}
        values: dict[str, object] = {}
        for name, value in {**kwargs, "model": model, "optimizer": optimizer}.items():
            kind = next((handler for of_type, handler in _handlers if isinstance(value, of_type)), None)
            if kind is None:
                values[name] = value
            else:
                by_name[name] = kind(value)
        self._by_name = by_name
        for name, handler in by_name.items():
            object.__setattr__(self, name, handler.value)
        super().__init__(bcast_object=broadcast_object, get_rank=rank, **values)

    def __getattr__(self, name: str) -> Any:
        """Raise an error that lists the attributes; called only for those that do not exist."""
        known = ", ".join([*self._by_name, *self.__dict__.get("_saved_state", {})])
        raise AttributeError(f"this state has no {name!r}; it has {known}", name=name, obj=self)

    def __setattr__(self, name: str, value: object) -> None:
        if name in self._by_name:
            self._by_name[name].set_value(value)
        super().__setattr__(name, value)

    def save(self) -> None:
        """Copy every ``state_dict``, and save the values."""
        for handler in self._by_name.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Return to the copies and values that were saved last."""
        for handler in self._by_name.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Give every rank the state of rank 0. Called by: every rank."""
        for handler in self._by_name.values():
            handler.sync()
        super().sync()

    def kept(self) -> dict[str, Any] | None:
        """Return the saved copies and values, except those whose handler keeps them in memory only."""
        own = {name: handler.kept() for name, handler in self._by_name.items()}
        return {"values": self._saved_state, "states": {name: one for name, one in own.items() if one is not None}}

    def take(self, kept: dict[str, Any]) -> None:
        """Return to the copies and values of another process."""
        for name, one in kept["states"].items():
            if name in self._by_name:
                self._by_name[name].take(one)
        super().take(kept)
