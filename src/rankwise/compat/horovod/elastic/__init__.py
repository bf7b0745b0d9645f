# SPDX-License-Identifier: Apache-2.0
"""``hvd.elastic``: trainings that continue after ranks or machines are lost."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from rankwise.compat.horovod.elastic.sampler import ElasticSampler
from rankwise.compat.horovod.elastic.state import ObjectState, State, TorchState, open_commits
from rankwise.compat.horovod.exceptions import HorovodInternalError, HostsUpdatedInterrupt, NotOffered, Refused
from rankwise.compat.horovod.initialization import rank
from rankwise.compat.horovod.queue import current_queue
from rankwise.errors import ConfigurationError, PeerFailed, PeerMissing
from rankwise.log import warn

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run", "run_fn"]


def __getattr__(name: str) -> object:
    """Raise an error that names a replacement, or the names that are offered."""
    if name == "notification_manager":
        raise NotOffered(
            f"hvd.elastic does not offer {name!r}.",
            do="omit it: State.check_host_updates() notices machines that joined or left",
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")


P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=State)

NUM_TRIES = 5
"""The number of failures in a row, without a commit in between, after which a training is not tried again."""


def run(func: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Make a training resume from the commits of an earlier attempt of the job, and survive failed operations.

    The function's first argument is its :class:`State`. When a rank fails, the launcher restarts all ranks (``rankwise
    run --max-restarts 3``, ``--nodes 1:4``): the whole script runs again, and this function restores the newest commit
    of any machine, calls the state's reset callbacks, gives every rank the same state, and calls the function.
    ``HorovodInternalError`` in the function returns to the last commit within the process, ``HostsUpdatedInterrupt``
    only synchronizes.

    Called by: every rank calls the returned function, the same number of times.

    Raises:
        PeerFailed, PeerMissing: another rank ended. The launcher restarts all ranks, if restarts are left.
        HorovodInternalError: five times in a row, without a commit in between.
    """
    return run_fn(func, lambda: None)


def run_fn(func: Callable[Concatenate[S, P], R], reset: Callable[[], object]) -> Callable[Concatenate[S, P], R]:
    """Do as :func:`run`, and call ``reset`` after a failed operation, before the state's reset callbacks.

    Called by: every rank, as for :func:`run`.

    Args:
        func: the training.
        reset: called without arguments; not when a job restarts, since its ranks are new processes.

    Raises:
        HorovodInternalError, PeerFailed, PeerMissing: as :func:`run`.
    """

    @functools.wraps(func)
    def wrapper(state: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if not isinstance(state, State):
            raise ConfigurationError(
                f"The first argument of {func.__name__}() is a {type(state).__name__}, not an elastic state.",
                do="pass hvd.elastic.TorchState(model=model, optimizer=optimizer, epoch=0)",
            )
        rank()  # raises if hvd.init() has not been called
        opened = open_commits()
        state.commit_to(opened)
        try:
            kept = opened.take_newest() if opened is not None and opened.is_later_attempt else None
            if kept is not None:
                state.take(kept)
                # Values may depend on the number of ranks, such as a learning rate that is multiplied by it.
                state.on_reset()
            return _run(func, reset, state, *args, **kwargs)
        finally:
            state.commit_to(None)

    return wrapper


def _run(
    func: Callable[Concatenate[S, P], R], reset: Callable[[], object], state: S, /, *args: P.args, **kwargs: P.kwargs
) -> R:
    skip_sync = False
    num_tries, num_commits = 0, state.num_commits
    while True:
        try:
            if not skip_sync:
                state.sync()
            return func(state, *args, **kwargs)
        except (PeerFailed, PeerMissing, Refused):
            # Another try would not help.
            raise
        except HorovodInternalError as error:
            num_tries = num_tries + 1 if state.num_commits == num_commits else 1
            num_commits = state.num_commits
            if num_tries == NUM_TRIES:
                raise
            warn(f"elastic: an operation failed; returning to the last commit: {error}", all_ranks=True)
            state.restore()
            skip_sync = False
        except HostsUpdatedInterrupt as interrupt:
            skip_sync = interrupt.skip_sync
        _forget_operations()
        reset()
        state.on_reset()


def _forget_operations() -> None:
    """Cancel this rank's operations, as Horovod does: other ranks may never call them."""
    queue = current_queue()
    for operation in tuple(queue.pending.values()):
        queue.withdraw(operation)
        operation.end(HorovodInternalError(f"{operation.request.name!r} was cancelled by a reset."))
    queue.num_unnamed.clear()
