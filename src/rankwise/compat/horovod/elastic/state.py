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
from rankwise.compat.horovod.operations.functions import (
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
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


class StateHandler:
    """Saves, restores and synchronises one value of a :class:`TorchState`. Subclass it for types of your own.

    Args:
        value: what is looked after.
    """

    def __init__(self, value: Any) -> None:  # noqa: ANN401 - of the subclass's type
        self.value = value

    def save(self) -> None:
        """Keep a copy of the value's state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to the copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give every rank rank 0's. Called by: every rank."""
        raise NotImplementedError

    def set_value(self, value: Any) -> None:  # noqa: ANN401 - see above
        """Look after another value from now on."""
        self.value = value
        self.save()

    def kept(self) -> dict[str, Any] | None:
        """Return the copy, for another process to go on from; ``None`` where it stays in memory only."""
        return None

    def take(self, kept: dict[str, Any]) -> None:
        """Go back to what :meth:`kept` returned in another process."""


class _ByStateDict(StateHandler):
    """Looks after what has ``state_dict`` and ``load_state_dict``."""

    def __init__(self, value: Any) -> None:  # noqa: ANN401 - a model, an optimizer, a sampler
        super().__init__(value)
        self._saved: dict[str, Any] = {}
        _ByStateDict.save(self)

    def save(self) -> None:
        """Copy the value's ``state_dict``."""
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Load the copy."""
        self.value.load_state_dict(self._saved)

    def kept(self) -> dict[str, Any] | None:
        """Return the copy."""
        return self._saved

    def take(self, kept: dict[str, Any]) -> None:
        """Load the copy of another process."""
        self._saved = kept
        self.restore()


class ModelStateHandler(_ByStateDict):
    """Looks after a model."""

    def sync(self) -> None:
        """Broadcast parameters and buffers. Called by: every rank."""
        broadcast_parameters(self.value.state_dict(), root_rank=0)


class OptimizerStateHandler(_ByStateDict):
    """Looks after an optimizer."""

    def sync(self) -> None:
        """Broadcast state and options. Called by: every rank."""
        broadcast_optimizer_state(self.value, root_rank=0)


class SamplerStateHandler(_ByStateDict):
    """Looks after an :class:`ElasticSampler`."""

    def sync(self) -> None:
        """Broadcast its place, and divide what is left. Called by: every rank."""
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))


_handlers: list[tuple[type, type[StateHandler]]] = [
    (nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """Return which handler looks after which type; the first that fits counts."""
    return _handlers


def set_handler_registry(registry: list[tuple[type, type[StateHandler]]]) -> None:
    """Replace which handler looks after which type."""
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

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever was given by that name
        """Say which attributes there are; Python comes here for those that are not."""
        known = ", ".join([*self._by_name, *self.__dict__.get("_saved_state", {})])
        raise AttributeError(f"this state has no {name!r}; it has {known}", name=name, obj=self)

    def __setattr__(self, name: str, value: object) -> None:
        if name in self._by_name:
            self._by_name[name].set_value(value)
        super().__setattr__(name, value)

    def save(self) -> None:
        """Copy every ``state_dict``, and note the values."""
        for handler in self._by_name.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Go back to what was saved last."""
        for handler in self._by_name.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Give every rank rank 0's. Called by: every rank."""
        for handler in self._by_name.values():
            handler.sync()
        super().sync()

    def kept(self) -> dict[str, Any] | None:
        """Return what was saved last, but for what only a handler of the user's own knows."""
        own = {name: handler.kept() for name, handler in self._by_name.items()}
        return {"values": self._saved_state, "states": {name: one for name, one in own.items() if one is not None}}

    def take(self, kept: dict[str, Any]) -> None:
        """Go back to what was saved in another process."""
        for name, one in kept["states"].items():
            if name in self._by_name:
                self._by_name[name].take(one)
        super().take(kept)
