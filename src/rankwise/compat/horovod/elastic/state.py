# SPDX-License-Identifier: Apache-2.0
"""What is kept across a failure: ``State``, and ``ObjectState`` for plain Python values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rankwise.comm.session import current_or_none
from rankwise.log import log

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rankwise.compat.horovod.elastic.commits import Commits


class State:
    """What :func:`run` goes back to after a failure. Base class: a subclass says how to save, restore and sync.

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
        """Have functions called when training goes on after a failure, or with other machines."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call :meth:`reset`, then the registered functions."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Save the state to go back to, so that it outlives this process, and look whether machines have come.

        Called by: every rank, at the same place of the loop.

        Under ``rankwise run`` one rank of each machine writes it into the job's temporary folder, which is removed
        with the job; a later attempt of the job goes on from there. Elsewhere it is kept in memory.

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
        """End this attempt, with the state committed, where the job is to go on with other machines, or to stop.

        Called by: every rank, at the same place of the loop. Costs nothing while nobody has asked.

        Raises:
            SystemExit: with 75. The launcher starts all ranks anew with the machine that has come, and :func:`run`
                takes up the state; where the job was asked to stop, it ends.
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
        """Go back to the copy that was saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give every rank the state of rank 0. Called by: every rank."""
        raise NotImplementedError

    def reset(self) -> None:
        """Do what has to be done before the registered functions are called; nothing by default."""

    def kept(self) -> dict[str, Any] | None:
        """Return what was saved last, for another process to go on from; ``None`` where it stays in memory only."""
        return None

    def take(self, kept: dict[str, Any]) -> None:
        """Go back to what :meth:`kept` returned in another process."""

    @property
    def num_commits(self) -> int:
        """How often this process has committed it."""
        return self._num_commits

    def commit_to(self, commits: Commits | None) -> None:
        """Choose where commits are written; ``None`` keeps them in memory. Called by :func:`run`."""
        self._commits = commits


class ObjectState(State):
    """Plain Python values, each an attribute of that name.

    Args:
        bcast_object: gives every rank rank 0's object; ``hvd.broadcast_object``.
        get_rank: returns this rank; ``hvd.rank``.
        kwargs: the values. They are kept as they are, not copied.
    """

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int], **kwargs: object) -> None:
        self._saved_state: dict[str, Any] = dict(kwargs)
        self._set_attributes()
        super().__init__(bcast_object=bcast_object, get_rank=get_rank)

    def save(self) -> None:
        """Note what the attributes hold."""
        self._saved_state = {name: getattr(self, name) for name in self._saved_state}

    def restore(self) -> None:
        """Set the attributes to what was noted last."""
        self._set_attributes()

    def sync(self) -> None:
        """Set the attributes to what rank 0 has noted last. Called by: every rank."""
        if self._saved_state:
            self._saved_state = self._bcast_object(self._saved_state)
            self._set_attributes()

    def kept(self) -> dict[str, Any] | None:
        """Return what was noted last."""
        return {"values": self._saved_state}

    def take(self, kept: dict[str, Any]) -> None:
        """Set the attributes to what was noted in another process."""
        self._saved_state = {**self._saved_state, **kept["values"]}
        self._set_attributes()

    def _set_attributes(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, value)
