# SPDX-License-Identifier: Apache-2.0
"""The public call: some ranks keep the parameters and update them, the others compute gradients."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rankwise.comm.agreement import same_on_all_ranks
from rankwise.comm.session import current
from rankwise.errors import ConfigurationError, RankwiseError, fold_ranks
from rankwise.health.event_log import post_expendable
from rankwise.health.preemption import StepSource
from rankwise.log import log
from rankwise.parameter_server.checks import ServerSetup, check_model, check_session, checked
from rankwise.parameter_server.setup import (
    RankRole,
    copy_optimizer_state_from,
    copy_parameters_from,
    open_worker_or_server,
)
from rankwise.parameter_server.snapshot import options_of
from rankwise.parameter_server.worker import left
from rankwise.replicate.bucket import divide_by_size
from rankwise.replicate.loss.hooks import check_weight_function
from rankwise.replicate.replicate import replicate
from rankwise.replicate.same_model import broadcast_model, broadcast_tensors, check_same_model

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from pathlib import Path

    import torch
    from torch import nn

    from rankwise.comm.session import Session
    from rankwise.parameter_server.checks import ServerSettings
    from rankwise.store.client import Store


class ParameterServer:
    """This rank's part in training with parameter servers."""

    def __init__(self, setup: ServerSetup | None, role: RankRole, model: nn.Module) -> None:
        self.servers: tuple[int, ...] = () if setup is None else tuple(setup.settings.servers)
        """The ranks that keep parameters."""
        self.workers: tuple[int, ...] = (0,) if setup is None else tuple(setup.settings.workers)
        """The ranks that compute gradients."""
        self.is_server = role.server_loop is not None
        """Whether this rank keeps parameters."""
        self._setup = setup
        self._model = model
        self._worker, self._server_loop, self._loader_state = role
        self._num_steps_finished = 0
        self._has_left = False
        self._unraised: RankwiseError | None = None
        """The error at the end of a loop that was left early."""

    @property
    def num_steps(self) -> int:
        """Steps that this worker has taken; 0 on a server."""
        return 0 if self._worker is None else self._worker.num_steps

    @property
    def num_updates(self) -> int:
        """Updates of this server; on a worker, of the server whose answer arrived last."""
        if self._server_loop is not None:
            return self._server_loop.num_updates
        return 0 if self._worker is None else self._worker.num_updates

    def restore(self, loader: Any) -> None:
        """Move ``loader`` to the position of the saved state, and have the servers save its position from now on.

        Called by: every rank, before the first loop. Without saved state the loader does not move. If workers were at
        different positions (``mode="async"``), all continue from the earliest.

        Args:
            loader: of the training loop, with ``state_dict`` and ``load_state_dict``.
        """
        if self._loader_state is not None:
            loader.load_state_dict(self._loader_state)
        if self._worker is not None:
            self._worker.report_loader(loader.state_dict)
        if self._setup is not None and self._setup.settings.folder is not None and isinstance(loader, StepSource):
            # The servers save when the workers have left.
            session = current()
            session.preemption.save_with(str(self._setup.settings.folder), loader, _nothing, is_restored=True)

    def serve(self) -> None:
        """Serve until every worker has reached the end of one more loop in which it took steps.

        Called by: servers, in place of a loop that is not over a :class:`rankwise.DataLoader`, whose loops serve by
        themselves. Workers call :meth:`finish` after such a loop. On a worker it does nothing.

        Raises:
            PeerFailed, PeerMissing: a rank failed that the others cannot continue without, or all workers have exited.
        """
        self.serve_loop(0)

    def serve_loop(self, loader: int) -> None:
        """Serve until every worker has reached the end of one more loop over a loader; the loader calls it.

        Args:
            loader: its number; 0 for a loop over anything, in which steps are taken.
        """
        if self._server_loop is not None:
            self._server_loop.serve(loader)

    def finish(self) -> None:
        """Take the newest parameters, and notify the servers that a loop is over.

        Called by: workers, after a loop that is not over a :class:`rankwise.DataLoader`, whose loops do it by
        themselves. On a server it does nothing.

        Raises:
            NotJoined: the world has been left.
        """
        self.finish_loop(0, has_stepped=True)

    def finish_loop(self, loader: int, *, has_stepped: bool) -> None:
        """Notify the servers that a loop over a loader is over; the loader calls it with its number.

        It waits only if steps were taken in the loop.
        """
        if self._worker is not None:
            self._worker.end_loop(loader, has_stepped=has_stepped)
            if has_stepped:
                self._num_steps_finished = self._worker.num_steps

    def break_loop(self, loader: int, *, has_stepped: bool) -> None:
        """Do the same after a loop that was left early; :meth:`leave` raises the error, which nobody would see here."""
        try:
            self.finish_loop(loader, has_stepped=has_stepped)
        except RankwiseError as error:
            self._unraised = error

    def leave(self) -> None:
        """Leave the other ranks; a server serves until all workers have left. The end of the world calls it.

        Raises:
            PeerFailed, PeerMissing: a rank failed or exited.
        """
        if self._unraised is not None:
            raise self._unraised
        if self._worker is not None:
            self._worker.leave()
        if self._server_loop is not None:
            self._server_loop.leave()
        self._has_left = True

    def synchronize(self) -> None:
        """Copy the servers' parameters and optimizer state to every rank, and the first worker's buffers.

        Called by: every rank, after a loop: before model and optimizer are saved by other means than ``directory=``, or
        evaluated in ``mode="async"``, where each worker has the parameters from the end of its own loop.

        Raises:
            ConfigurationError: it was called within a loop, while the servers are busy.
            NotJoined: the world has been left.
            PeerFailed, PeerMissing: a rank failed or exited.
        """
        if self._has_left:
            raise left("server.synchronize()")
        if self._worker is not None and self._worker.num_steps != self._num_steps_finished:
            raise ConfigurationError(
                "synchronize() was called within a loop, while the servers are serving.",
                do="call it after the loop over rankwise.DataLoader, or after finish(); to save within a loop, "
                "pass parameter_server(..., directory=...)",
            )
        setup = self._setup
        if setup is None:
            return
        for server, numbers in zip(self.servers, setup.numbers_of, strict=True):
            kept = [setup.parameters[number] for number in numbers]
            copy_parameters_from(kept, server, setup.exchange)
            copy_optimizer_state_from(setup.optimizer, kept, server, setup.exchange)
        buffers = [buffer.detach() for buffer in self._model.buffers()]
        broadcast_tensors(buffers, setup.exchange, what="buffers of the first worker", source=self.workers[0])


def _nothing() -> None:
    pass


@contextmanager
def uncollected() -> Generator[None]:
    """Collect no garbage meanwhile: among many parameters, which all live on, that takes as long as the rest."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@uncollected()
def parameter_server(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    servers: int | Sequence[int] = 1,
    mode: str = "sync",
    max_staleness: int | None = None,
    weight: Callable[..., float | torch.Tensor] | None = None,
    directory: str | Path | None = None,
    save_every: int = 100,
) -> ParameterServer:
    """Train with parameter servers: some ranks keep the parameters and update them, the others compute gradients.

    Called by: every rank, with the same arguments, before the :class:`rankwise.DataLoader` is built: only workers get
    samples. The same script runs on all ranks. A server's loop over the loader yields nothing, and ends when all
    workers have reached the end of theirs. On a worker ``optimizer.step()`` sends gradients and receives parameters;
    the optimizer itself runs on the servers, with the options (learning rate) that the workers' has at each step.

    ``mode="sync"``: every step is one update with the mean over all samples of all workers: exactly the result of
    data parallel training on the workers, or of one rank. Gradients between ``backward()`` and ``step()`` are the
    worker's own: clipping them is not clipping their mean. A ``GradScaler`` would skip steps on one worker only.

    ``mode="async"``: each worker's gradients are an update of their own, in order of arrival (Hogwild). A slow worker
    does not delay the others, and under ``rankwise run`` one that fails does not end them: they continue, and no
    collective of all ranks can follow. A gradient may be computed from older parameters than those it is applied to,
    the result depends on timing, and rankwise's promise about results does not apply. Without a bound, a worker
    begins its next step before the servers have answered the last one.

    Each parameter is kept whole by one server. Sparse gradients (``nn.Embedding(sparse=True)``) move only
    the rows they have, and with SGD without momentum, Adagrad and SparseAdam only rows that changed come back.
    On one rank this is :func:`rankwise.replicate`, and nothing is saved.

    Args:
        model: on its device, without any other strategy.
        optimizer: of parameters of ``model``, without state yet. It must update each parameter independently.
        servers: how many ranks are servers (the last ones), or which.
        mode: ``"sync"`` or ``"async"``.
        max_staleness: with ``"async"``: no worker begins a step while it is more than this many steps ahead of the
            slowest (stale-synchronous). Workers that have exited do not count.
        weight: as for :func:`rankwise.replicate`.
        directory: where each server saves parameters and optimizer state; a job that restarts with as many servers
            continues from there. A server on its own host may use a local disk.
        save_every: after how many updates servers save; they also do at the end of every loop.

    Returns:
        This rank's part: :class:`ParameterServer`, with ``is_server``, ``restore(loader)`` and ``synchronize()``.

    Raises:
        NotJoined: before :func:`rankwise.join`.
        ConfigurationError: invalid or contradictory arguments, or arguments that differ between ranks; the loader was
            built before; there is a mesh; no rank is left as a worker.
        ModelMismatch: the model is not the same on every rank.
        CheckpointError: ``directory`` belongs to another model, optimizer or number of servers, lacks the files of one
            server, or cannot be written to.

    Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server" (OSDI 2014); Recht et al.,
        "Hogwild!" (arXiv:1106.5730); Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel
        Parameter Server" (NIPS 2013).
    """
    session = current()
    world = session.world
    settings = checked(
        world,
        servers=servers,
        mode=mode,
        max_staleness=max_staleness,
        directory=directory,
        save_every=save_every,
    )
    check_weight_function(weight, "parameter_server")
    numbers, names = check_model(model, optimizer)
    check_session(session)
    if world.world_size == 1:
        replicate(model, weight=weight)
        return ParameterServer(None, RankRole(), model)
    do = "pass the same arguments on every rank"
    same_on_all_ranks("parameter_server()", [str(settings), mode], do=do, error=ConfigurationError)
    same_on_all_ranks(
        "the optimizer", [type(optimizer).__name__, options_of(optimizer), numbers], do=do, error=ConfigurationError
    )
    check_same_model(model)
    exchange = session.exchange
    if exchange is None or session.store is None or session.detector is None:
        raise TypeError(f"a world of {world.world_size} rank has no collectives")
    broadcast_model(model, exchange)
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    setup = ServerSetup(
        world=world,
        detector=session.detector,
        store=session.store,
        exchange=exchange,
        settings=settings,
        optimizer=optimizer,
        names=names,
        parameters=own,
        numbers_of=divide_by_size([parameter.nbytes for parameter in own], len(settings.servers)),
    )
    server = ParameterServer(setup, open_worker_or_server(setup, model, weight), model)
    _follow_session(session, session.store, settings, server)
    what = mode if max_staleness is None else f"{mode}, at most {max_staleness} steps apart"
    log(f"parameter servers: {fold_ranks(settings.servers)}; workers: {fold_ranks(settings.workers)}; {what}")
    return server


def _follow_session(session: Session, store: Store, settings: ServerSettings, server: ParameterServer) -> None:
    """Have the session serve, save and leave by this rank's part."""
    session.split_work(settings.workers, server)
    session.on_leave(server.leave)
    session.average_worker_groups()
    session.before_save(server.synchronize)
    if server.is_server:
        session.preemption.be_passive()
    if not settings.is_sync:
        session.preemption.stop_alone()
        post_expendable(store, settings.workers)
