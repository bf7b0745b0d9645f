# SPDX-License-Identifier: Apache-2.0
"""Opening both ends: servers begin to listen, take up what was saved, and workers connect."""

from __future__ import annotations

import secrets
import time
import weakref
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch

from rankwise import rendezvous
from rankwise.collectives import gather_json
from rankwise.errors import CheckpointError, ConfigurationError, PeerMissing, fold_ranks, fold_values
from rankwise.log import log
from rankwise.parallel.after_forward import AfterForward
from rankwise.parallel.gradient_sync import GradientSync
from rankwise.parallel.loss.reading import subscribe
from rankwise.parallel.loss.verdict import Mode
from rankwise.parallel.own_hooks import leave_out_of_copies
from rankwise.parallel.server.kept import Kept
from rankwise.parallel.server.memory import create_memory, shared_home
from rankwise.parallel.server.options import options_of, set_options
from rankwise.parallel.server.pace import Pace
from rankwise.parallel.server.same_state import give_parameters
from rankwise.parallel.server.saved import Saved
from rankwise.parallel.server.service import Service
from rankwise.parallel.server.serving import Serving
from rankwise.parallel.server.wire import SECRET_KEY
from rankwise.parallel.server.worker import Place, Server, Worker, close_all
from rankwise.parallel.trained import note_trained
from rankwise.session import current
from rankwise.store.wire import listen
from rankwise.torch_private.optimizers import mark_step
from rankwise.watch import SLICE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn

    from rankwise.exchange.protocol import Exchange
    from rankwise.parallel.server.checks import Setting
    from rankwise.store import Store
    from rankwise.watch import Watch
    from rankwise.world import World


_OF_SEVERAL_TERMS = (
    "the loss ({where}) has several terms, and workers do not tell one another what each of them is over: its "
    "gradients are averaged by samples, which differs from what one rank computes where the terms count different "
    "things; take one mean or one sum, or pass what it is over to rankwise.weight(model, amount)"
)


@dataclass(frozen=True, kw_only=True)
class Ground:
    """What both ends stand on."""

    world: World
    watch: Watch
    store: Store
    exchange: Exchange
    setting: Setting
    optimizer: torch.optim.Optimizer
    names: Sequence[str]
    parameters: Sequence[nn.Parameter]
    """Of the optimizer, in its order."""
    numbers_of: Sequence[Sequence[int]]
    """Which of them each server keeps."""


@dataclass(frozen=True, kw_only=True)
class Opened:
    """One rank's end."""

    worker: Worker | None
    serving: Serving | None
    loader_state: dict[str, Any] | None
    """Where the workers stood when the state was saved that all go on from."""


def open_ends(ground: Ground, model: nn.Module, weight: Callable[..., float | torch.Tensor] | None) -> Opened:
    """Open this rank's end.

    Called by: every rank.
    """
    ground.store.set_if_absent(SECRET_KEY, secrets.token_hex(32))
    secret = ground.store.get(SECRET_KEY, ground.watch.timeout_seconds)
    setting, rank = ground.setting, ground.world.rank
    index = setting.servers.index(rank) if rank in setting.servers else None
    kept = service = saved = mapping = None
    told: dict[str, Any] = {}
    home = shared_home(ground.exchange, ground.world)
    if index is not None:
        own = [ground.parameters[number] for number in ground.numbers_of[index]]
        saved = _saved(ground, index)
        mapping = create_memory(own) if home else None
        kept = Kept(own, ground.optimizer, ground.optimizer.step, mapping)
        host = rendezvous.address_on_job(ground.store, ground.world)
        service = Service(listen(host, 0), secret, setting.workers, own)
        told = {
            "host": ground.world.hostname if host == rendezvous.EVERY_INTERFACE else host,
            "port": service.port,
            "home": home,
            "memory": "" if mapping is None else mapping.ticket,
            "updates": [] if saved is None else saved.updates(),
        }
    of_rank = gather_json(told, what="parameter_server()")
    found = {server: of_rank[server]["updates"] for server in setting.servers}
    updates = _updates_to_load(found, is_sync=setting.is_sync)
    loader_state = None
    if updates is not None:
        stood: dict[str, Any] = {}
        if index is not None and saved is not None and kept is not None:
            stood = saved.load(updates[index])
            kept.num_updates = updates[index]
        loader_state = _take_up(ground, stood)
        log(f"parameter servers go on from update {min(updates)} in {setting.folder}")
    if kept is not None and service is not None:
        serving = Serving(
            kept,
            service,
            Pace(setting.workers, setting.max_staleness),
            is_sync=setting.is_sync,
            saved=saved,
            world=ground.world,
            watch=ground.watch,
        )
        _wait_for_workers(service, ground)
        if mapping is not None:
            mapping.settle()
        _noted(model)
        _replace_step(ground.optimizer, _refuse_step)
        return Opened(worker=None, serving=serving, loader_state=loader_state)
    place = Place(world=ground.world, watch=ground.watch, store=ground.store)
    # Where staleness has a bound, what a gradient is computed from is as new as can be had.
    is_ahead = not setting.is_sync and setting.max_staleness is None
    worker = Worker(ground.parameters, ground.names, place, is_ahead=is_ahead)
    servers = [
        _server(rank, of_rank[rank], numbers, home)
        for rank, numbers in zip(setting.servers, ground.numbers_of, strict=True)
    ]
    worker.connect(servers, secret)
    weakref.finalize(worker, close_all, worker.channels).atexit = False
    _follow(model, ground.optimizer, worker, weight, num_workers=len(setting.workers))
    return Opened(worker=worker, serving=None, loader_state=loader_state)


def _server(rank: int, told: Mapping[str, Any], numbers: Sequence[int], home: str) -> Server:
    can_share = bool(home) and told["home"] == home
    return Server(
        rank=rank,
        host=told["host"],
        port=told["port"],
        numbers=numbers,
        ticket=told["memory"] if can_share else "",
    )


def _saved(ground: Ground, index: int) -> Saved | None:
    setting, numbers = ground.setting, ground.numbers_of[index]
    if setting.folder is None:
        return None
    return Saved(
        setting.folder,
        server=index,
        num_servers=len(setting.servers),
        every=setting.save_every,
        names=[ground.names[number] for number in numbers],
        parameters=[ground.parameters[number] for number in numbers],
        optimizer=ground.optimizer,
    )


def _updates_to_load(found: Mapping[int, Sequence[int]], *, is_sync: bool) -> list[int] | None:
    """Return which update's file each server takes up; ``None`` where nothing has been saved yet.

    Args:
        found: by server, oldest first.
        is_sync: whether all have to be of the same update.

    Raises:
        CheckpointError: servers have files, and there is not one for all.
    """
    if is_sync:
        common = set.intersection(*map(set, found.values()))
        if common:
            return [max(common)] * len(found)
    elif all(found.values()):
        return [updates[-1] for updates in found.values()]
    # One that ended while servers saved for the first time is the same as nothing saved.
    if max(map(len, found.values())) > 1:
        said = {server: ", ".join(map(str, updates)) or "none" for server, updates in found.items()}
        raise CheckpointError(
            "The parameter servers have no saved state in common to go on from.",
            evidence=f"whole files, by update:\n{fold_values(said)}",
            do="bring back the files that are missing; or begin anew with another directory=",
        )
    return None


def _take_up(ground: Ground, stood: dict[str, Any]) -> dict[str, Any] | None:
    """Give all ranks what the servers have loaded; return where all workers go on.

    Called by: every rank.
    """
    told = {"workers": stood, "groups": options_of(ground.optimizer)}
    of_rank = gather_json(told, what="parameter_server()")
    set_options(ground.optimizer, of_rank[ground.setting.servers[0]]["groups"])
    for server, numbers in zip(ground.setting.servers, ground.numbers_of, strict=True):
        give_parameters([ground.parameters[number] for number in numbers], server, ground.exchange)
    states = [state for one in of_rank for state in one["workers"].values()]
    return min(states, key=lambda state: (state.get("epoch", 0), state.get("position", 0)), default=None)


def _wait_for_workers(service: Service, ground: Ground) -> None:
    deadline = time.monotonic() + ground.watch.timeout_seconds
    workers = set(ground.setting.workers)
    with service.changed:
        while not service.connected >= workers:
            service.changed.wait(SLICE_SECONDS)
            if ground.watch.error is not None:
                raise ground.watch.error
            if time.monotonic() > deadline:
                missing = sorted(workers - service.connected)
                raise PeerMissing(
                    f"parameter_server() waited {ground.watch.timeout_seconds:.0f} s in vain for workers to connect. "
                    f"Missing: {fold_ranks(missing)}.",
                    ranks=missing,
                    where=str(ground.world),
                    do="look at the output of that rank",
                )


def _follow(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    worker: Worker,
    weight: Callable[..., float | torch.Tensor] | None,
    *,
    num_workers: int,
) -> None:
    """Have steps of the optimizer go to the servers, with what their gradients are the mean or the sum over."""
    weights: list[float] = []
    sums: list[bool] = []
    num_parameters = sum(len(group["params"]) for group in optimizer.param_groups)
    sync = _noted(model)
    sync.loss.is_averaged_elsewhere = True
    sync.loss.is_given_by_forward = weight is not None
    if num_workers > 1:
        sync.loss.cautions[Mode.TERMS] = _OF_SEVERAL_TERMS
    subscribe(sync.loss, current())

    def note(weight: float) -> None:
        weights.append(weight)
        sums.append(sync.loss.is_sum)

    sync.on_mean = note
    model.register_forward_hook(AfterForward(sync, weight), with_kwargs=True)
    leave_out_of_copies(model)

    def step(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:  # noqa: ANN401 - the loss
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if sum(len(group["params"]) for group in self.param_groups) != num_parameters:
            raise ConfigurationError(
                "The optimizer got parameters after parameter_server(), which no server keeps.",
                do="build the whole optimizer first; a layer that is unfrozen later may be in it from the beginning",
            )
        worker.step(weights, sums, options_of(self))
        weights.clear()
        sums.clear()
        return loss

    # What torch puts around every optimizer's step: hooks, and its name in profiles.
    _replace_step(optimizer, torch.optim.Optimizer.profile_hook_step(step))


def _replace_step(optimizer: torch.optim.Optimizer, step: Any) -> None:  # noqa: ANN401 - a function
    mark_step(optimizer, step)
    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]


def _noted(model: nn.Module) -> GradientSync:
    """Note that the model trains on several ranks; return what counts the samples of its gradients."""
    named = list(model.named_parameters())
    sync = GradientSync([name for name, _ in named], [one for _, one in named], None, type(model).__name__)
    sync.strategy = "parameter_server"
    note_trained(model, sync)
    return sync


def _refuse_step(_: torch.optim.Optimizer, *_arguments: object, **_keywords: object) -> None:
    raise ConfigurationError(
        "optimizer.step() was called on a parameter server, which takes no steps of its own.",
        do="iterate over rankwise.DataLoader, which yields nothing on a server; for a loop of another kind: "
        "`if server.is_server: server.serve()`, and server.finish() after the loop on workers",
    )
