# SPDX-License-Identifier: Apache-2.0
"""Opening both ends: servers listen and load their snapshots, and workers connect."""

from __future__ import annotations

import secrets
import time
import weakref
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from rankwise.comm.collectives import gather_json
from rankwise.comm.session import current
from rankwise.errors import CheckpointError, ConfigurationError, PeerMissing, fold_ranks, fold_values
from rankwise.health.collective_timeout import SLICE_SECONDS
from rankwise.log import log
from rankwise.parameter_server.messages import SECRET_KEY, WorkerConnections, create_memory, shared_home
from rankwise.parameter_server.server_loop import ServerLoop, StalenessBound
from rankwise.parameter_server.shard import ParameterShard
from rankwise.parameter_server.snapshot import ServerSnapshots, dense, options_of, set_options
from rankwise.parameter_server.worker import ServerAddress, Worker, close_all
from rankwise.replicate.batchnorm import take_torchs_batchnorm
from rankwise.replicate.device_of_inputs import check_device_of_inputs
from rankwise.replicate.gradient_sync import GradientSync, SyncAfterForward
from rankwise.replicate.loss.hooks import subscribe
from rankwise.replicate.loss.reports import Mode
from rankwise.replicate.own_hooks import leave_out_of_copies
from rankwise.replicate.same_model import broadcast_tensors
from rankwise.replicate.strategy_registry import register
from rankwise.store import bootstrap
from rankwise.store.wire import listen
from rankwise.torch_private.modules import mark_step

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn

    from rankwise.comm.backends.protocol import Exchange
    from rankwise.parameter_server.checks import ServerSetup


_OF_SEVERAL_TERMS = (
    "the loss ({where}) has several terms, and workers do not exchange the number that each averages "
    "over: its gradients are averaged by samples, which differs from the result of one rank if the terms "
    "average over different numbers; use one mean or one sum, or pass that number to "
    "rankwise.weight(model, amount)"
)


class RankRole(NamedTuple):
    """The role of this rank: a worker or a server."""

    worker: Worker | None = None
    server_loop: ServerLoop | None = None
    loader_state: dict[str, Any] | None = None
    """The workers' position in the snapshot from which all ranks continue."""


def open_worker_or_server(
    setup: ServerSetup, model: nn.Module, weight: Callable[..., float | torch.Tensor] | None
) -> RankRole:
    """Open this rank's end.

    Called by: every rank.
    """
    setup.store.set_if_absent(SECRET_KEY, secrets.token_hex(32))
    secret = setup.store.get(SECRET_KEY, setup.detector.timeout_seconds)
    if setup.world.rank in setup.settings.servers:
        return _open_server(setup, model, secret)
    return _open_worker(setup, model, weight, secret)


def _open_server(setup: ServerSetup, model: nn.Module, secret: bytes) -> RankRole:
    settings, home = setup.settings, shared_home(setup.exchange, setup.world)
    index = settings.servers.index(setup.world.rank)
    own = [setup.parameters[number] for number in setup.numbers_of[index]]
    snapshots = _snapshots(setup, index)
    mapping = create_memory(own) if home else None
    shard = ParameterShard(own, setup.optimizer, setup.optimizer.step, mapping)
    host = bootstrap.address_on_job(setup.store, setup.world)
    connections = WorkerConnections(listen(host, 0), secret, settings.workers, own)
    reported = {
        "host": setup.world.hostname if host == bootstrap.EVERY_INTERFACE else host,
        "port": connections.port,
        "home": home,
        "memory": "" if mapping is None else mapping.ticket,
        "updates": [] if snapshots is None else snapshots.updates(),
    }
    _, updates = _report(setup, reported)
    loader_state = None
    if updates is not None and snapshots is not None:
        loader_states = snapshots.load(updates[index])
        shard.continue_from(updates[index])
        loader_state = _load_saved(setup, updates, loader_states)
    staleness = StalenessBound(settings.workers, settings.max_staleness)
    server_loop = ServerLoop(setup, shard, connections, staleness, snapshots)
    # While workers connect.
    register(model, _sync_of(model))
    _wait_for_workers(connections, setup)
    if mapping is not None:
        mapping.settle()
    _replace_step(setup.optimizer, _refuse_step)
    return RankRole(server_loop=server_loop, loader_state=loader_state)


def _open_worker(
    setup: ServerSetup, model: nn.Module, weight: Callable[..., float | torch.Tensor] | None, secret: bytes
) -> RankRole:
    settings, home = setup.settings, shared_home(setup.exchange, setup.world)
    # While servers create their memory.
    sync = _sync_of(model)
    of_rank, updates = _report(setup, {})
    loader_state = None if updates is None else _load_saved(setup, updates, {})
    # With a staleness bound, gradients are computed from the newest parameters.
    worker = Worker(setup, is_ahead=not settings.is_sync and settings.max_staleness is None)
    servers = [
        ServerAddress(
            rank=rank,
            host=of_rank[rank]["host"],
            port=of_rank[rank]["port"],
            numbers=numbers,
            ticket=of_rank[rank]["memory"] if home and of_rank[rank]["home"] == home else "",
        )
        for rank, numbers in zip(settings.servers, setup.numbers_of, strict=True)
    ]
    worker.connect(servers, secret)
    weakref.finalize(worker, close_all, worker.channels).atexit = False
    register(model, sync)
    check_device_of_inputs(model, setup.world.device, "parameter_server")
    _follow(model, setup.optimizer, worker, weight, sync, num_workers=len(settings.workers))
    return RankRole(worker=worker, loader_state=loader_state)


def _report(setup: ServerSetup, own: dict[str, Any]) -> tuple[list[dict[str, Any]], list[int] | None]:
    """Return what every rank reports, and the update whose file each server loads."""
    of_rank = gather_json(own, what="parameter_server()")
    found = {server: of_rank[server]["updates"] for server in setup.settings.servers}
    return of_rank, _updates_to_load(found, is_sync=setup.settings.is_sync)


def _snapshots(setup: ServerSetup, index: int) -> ServerSnapshots | None:
    settings, numbers = setup.settings, setup.numbers_of[index]
    if settings.folder is None:
        return None
    return ServerSnapshots(
        settings.folder,
        server=index,
        num_servers=len(settings.servers),
        every=settings.save_every,
        names=[setup.names[number] for number in numbers],
        parameters=[setup.parameters[number] for number in numbers],
        optimizer=setup.optimizer,
    )


def _updates_to_load(found: Mapping[int, Sequence[int]], *, is_sync: bool) -> list[int] | None:
    """Return the update whose file each server loads; ``None`` if nothing was saved yet.

    Args:
        found: updates of the files of each server, oldest first.
        is_sync: whether all must be of the same update.

    Raises:
        CheckpointError: servers have files, but not one for each.
    """
    if is_sync:
        common = set.intersection(*map(set, found.values()))
        if common:
            return [max(common)] * len(found)
    elif all(found.values()):
        return [updates[-1] for updates in found.values()]
    # A job that ended during the first save of the servers has saved nothing.
    if max(map(len, found.values())) > 1:
        texts = {server: ", ".join(map(str, updates)) or "none" for server, updates in found.items()}
        raise CheckpointError(
            "The parameter servers have no common saved state to continue from.",
            evidence=f"whole files, by update:\n{fold_values(texts)}",
            do="restore the missing files, or start over with another directory=",
        )
    return None


def _load_saved(setup: ServerSetup, updates: list[int], loader_states: dict[str, Any]) -> dict[str, Any] | None:
    """Give all ranks the state that the servers have loaded; return the position from which all workers continue.

    Called by: every rank.
    """
    reported = {"workers": loader_states, "groups": options_of(setup.optimizer)}
    of_rank = gather_json(reported, what="parameter_server()")
    set_options(setup.optimizer, of_rank[setup.settings.servers[0]]["groups"])
    for server, numbers in zip(setup.settings.servers, setup.numbers_of, strict=True):
        copy_parameters_from([setup.parameters[number] for number in numbers], server, setup.exchange)
    log(f"parameter servers continue from update {min(updates)} in {setup.settings.folder}")
    states = [state for one in of_rank for state in one["workers"].values()]
    return min(states, key=lambda state: (state.get("epoch", 0), state.get("position", 0)), default=None)


def _wait_for_workers(connections: WorkerConnections, setup: ServerSetup) -> None:
    deadline = time.monotonic() + setup.detector.timeout_seconds
    workers = set(setup.settings.workers)
    with connections.changed:
        while not connections.connected >= workers:
            connections.changed.wait(SLICE_SECONDS)
            if setup.detector.error is not None:
                raise setup.detector.error
            if time.monotonic() > deadline:
                missing = sorted(workers - connections.connected)
                raise PeerMissing(
                    f"parameter_server() timed out after {setup.detector.timeout_seconds:.0f} s waiting for "
                    f"{fold_ranks(missing)} to connect.",
                    ranks=missing,
                    where=str(setup.world),
                    do="look at the output of that rank",
                )


def _follow(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    worker: Worker,
    weight: Callable[..., float | torch.Tensor] | None,
    sync: GradientSync,
    *,
    num_workers: int,
) -> None:
    """Have steps of the optimizer go to the servers, with the number of samples of their gradients."""
    weights: list[float] = []
    sums: list[bool] = []
    num_parameters = sum(len(group["params"]) for group in optimizer.param_groups)
    sync.loss.expect_weights(by_forward=weight is not None, averages_elsewhere=True)
    if num_workers > 1:
        sync.loss.cautions[Mode.TERMS] = _OF_SEVERAL_TERMS
    subscribe(sync.loss, current())

    def note(weight: float) -> None:
        weights.append(weight)
        sums.append(sync.loss.is_sum)

    sync.report_mean_to(note)
    model.register_forward_hook(SyncAfterForward(sync, weight), with_kwargs=True)
    leave_out_of_copies(model)

    def step(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if sum(len(group["params"]) for group in self.param_groups) != num_parameters:
            raise ConfigurationError(
                "Parameters were added to the optimizer after parameter_server(), so no server has them.",
                do="create the whole optimizer first; it may contain layers that are unfrozen later",
            )
        worker.step(weights, sums, options_of(self))
        weights.clear()
        sums.clear()
        return loss

    # Torch wraps every optimizer's step in this, for hooks and for its name in profiles.
    _replace_step(optimizer, torch.optim.Optimizer.profile_hook_step(step))


def _replace_step(optimizer: torch.optim.Optimizer, step: Any) -> None:
    mark_step(optimizer, step)
    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]


def _sync_of(model: nn.Module) -> GradientSync:
    """Return what counts the samples of the model's gradients."""
    take_torchs_batchnorm(model)
    named = list(model.named_parameters())
    names, parameters = [name for name, _ in named], [one for _, one in named]
    return GradientSync(names, parameters, None, type(model).__name__, strategy="parameter_server")


def _refuse_step(_: torch.optim.Optimizer, *_arguments: object, **_keywords: object) -> None:
    raise ConfigurationError(
        "optimizer.step() was called on a parameter server; only workers call it.",
        do="iterate over rankwise.DataLoader, which yields nothing on a server; in other loops: `if "
        "server.is_server: server.serve()`, and server.finish() after the loop on workers",
    )


def copy_parameters_from(parameters: Sequence[nn.Parameter], source: int, exchange: Exchange) -> None:
    """Overwrite parameters with those of rank ``source``.

    Called by: every rank.
    """
    with torch.no_grad():
        tensors = [parameter.detach() for parameter in parameters]
        broadcast_tensors(tensors, exchange, what=f"parameters of rank {source}", source=source)


def copy_optimizer_state_from(
    optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], source: int, exchange: Exchange
) -> None:
    """Overwrite the optimizer's state of ``parameters`` with that of rank ``source``.

    Called by: every rank.
    """
    own = [dict(optimizer.state.get(parameter, {})) for parameter in parameters]
    is_source = exchange.rank == source
    reported = gather_json(
        [_state_facts(state) for state in own] if is_source else None, what="optimizer state of a server"
    )
    tensors: list[torch.Tensor] = []
    for parameter, state, entries in zip(parameters, own, reported[source], strict=True):
        taken = {
            key: value if dtype is None else _tensor_like(state.get(key), parameter, dtype, shape, on_device=on_device)
            for key, value, dtype, shape, on_device in entries
        }
        if taken:
            optimizer.state[parameter] = state if is_source else taken
        keys = [key for key, _, dtype, _, _ in entries if dtype is not None]
        tensors += [dense(state[key]) if is_source else taken[key] for key in keys]
    with torch.no_grad():
        broadcast_tensors(tensors, exchange, what=f"optimizer state of rank {source}", source=source)


def _state_facts(state: dict[str, Any]) -> list[list[Any]]:
    """Return the state of one parameter as JSON: key, value, and dtype, shape and place of a tensor."""
    return [
        [key, None, str(value.dtype).removeprefix("torch."), list(value.shape), value.ndim > 0]
        if isinstance(value, torch.Tensor)
        else [key, value, None, None, False]
        for key, value in state.items()
    ]


def _tensor_like(
    now: object, parameter: nn.Parameter, dtype: str, shape: list[int], *, on_device: bool
) -> torch.Tensor:
    if isinstance(now, torch.Tensor) and list(now.shape) == shape:
        return now
    # Scalars, such as the number of steps, stay on the CPU.
    device = parameter.device if on_device else torch.device("cpu")
    return torch.empty(shape, dtype=getattr(torch, dtype), device=device)
