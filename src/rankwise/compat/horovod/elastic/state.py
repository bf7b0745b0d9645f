# SPDX-License-Identifier: Apache-2.0
"""State that is kept across a failure: ``State``, ``ObjectState`` for plain values, ``TorchState`` for a training."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rankwise.comm.session import current_or_none
from rankwise.compat.horovod.elastic.sampler import ElasticSampler
from rankwise.compat.horovod.initialization import rank
from rankwise.compat.horovod.objects_and_state import (
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from rankwise.log import log

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rankwise.compat.horovod.elastic.commits import Commits


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
