# SPDX-License-Identifier: Apache-2.0
"""The arguments of ``parameter_server``, checked before anything is opened."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rankwise.errors import ConfigurationError
from rankwise.replicate.strategy_registry import check_unregistered
from rankwise.torch_private.dtensor import own_part

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from rankwise.comm.backends.protocol import Exchange
    from rankwise.comm.session import Session
    from rankwise.health.failure_detector import FailureDetector
    from rankwise.store.client import Store
    from rankwise.world.facts import World

MODES = ("sync", "async")


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Which ranks are servers and workers, and how they train."""

    servers: list[int]
    workers: list[int]
    is_sync: bool
    max_staleness: int | None
    folder: Path | None
    save_every: int


@dataclass(frozen=True, kw_only=True)
class ServerSetup:
    """What workers and servers are opened with."""

    world: World
    detector: FailureDetector
    store: Store
    exchange: Exchange
    settings: ServerSettings
    optimizer: torch.optim.Optimizer
    names: Sequence[str]
    parameters: Sequence[nn.Parameter]
    """Of the optimizer, in its order."""
    numbers_of: Sequence[Sequence[int]]
    """Which of them each server keeps."""


def checked(
    world: World,
    *,
    servers: int | Sequence[int],
    mode: str,
    max_staleness: int | None,
    directory: str | Path | None,
    save_every: int,
) -> ServerSettings:
    """Return the arguments of a call.

    Raises:
        ConfigurationError: one is invalid, or two contradict each other.
    """
    if mode not in MODES:
        raise ConfigurationError(f"Unknown mode {mode!r} of parameter_server.", do='pass mode="sync" or mode="async"')
    if max_staleness is not None and mode == "sync":
        raise ConfigurationError('max_staleness requires mode="async".', do='pass mode="async", or omit max_staleness')
    _check_count("max_staleness", max_staleness, 0)
    _check_count("save_every", save_every, 1)
    size = world.world_size
    if isinstance(servers, int) and not isinstance(servers, bool):
        chosen = list(range(size - servers, size)) if 0 < servers < size else []
    else:
        chosen = sorted(set(servers)) if not isinstance(servers, bool) else []
    if size == 1:
        chosen = []
    elif not chosen or len(chosen) >= size or not set(chosen) <= set(range(size)):
        raise ConfigurationError(
            f"servers={servers!r} is invalid for {size} ranks: at least one server and one worker are required.",
            where=str(world),
            do=f"pass servers=1 to servers={size - 1}, or a list of ranks; or start more ranks: rankwise run -n "
            f"{size + 1} ...",
        )
    return ServerSettings(
        servers=chosen,
        workers=[rank for rank in range(size) if rank not in chosen],
        is_sync=mode == "sync",
        max_staleness=max_staleness,
        folder=None if directory is None else Path(directory).absolute(),
        save_every=save_every,
    )


def _check_count(name: str, value: object, least: int) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
        raise ConfigurationError(f"{name} cannot be {value!r}.", do=f"pass an integer of at least {least}")


def check_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[list[int], list[str]]:
    """Return the numbers and names, in the model, of the optimizer's parameters, in its order.

    Raises:
        ConfigurationError: servers cannot keep them.
    """
    named = check_unregistered(model, "parameter_server")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(
            f"optimizer of parameter_server must be a torch.optim.Optimizer, not a {type(optimizer).__name__}.",
            do="pass the optimizer of the model's parameters",
        )
    number_of = {id(parameter): number for number, parameter in enumerate(named.values())}
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    strange = [parameter for parameter in own if id(parameter) not in number_of]
    if strange:
        raise ConfigurationError(
            f"The optimizer has a parameter that is not the model's: {list(strange[0].shape)}.",
            do="create the optimizer with model.parameters(), and pass both",
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigurationError(
            "parameter_server does not support LBFGS, which evaluates the loss several times per step.",
            do="use another optimizer, or rankwise.replicate(model)",
        )
    if any(_has_stepped(state) for state in optimizer.state.values()):
        raise ConfigurationError(
            "The optimizer has already taken steps, and the servers would not have its state.",
            do="call parameter_server() right after creating the optimizer",
        )
    spread_over_ranks = [p for p in own if own_part(p) is not p or p.is_meta]
    if spread_over_ranks:
        raise ConfigurationError(
            "A parameter of the model is not a plain tensor of this rank.",
            evidence=f"it is a {type(spread_over_ranks[0]).__name__} on {spread_over_ranks[0].device}",
            do="pass a model that is whole on every rank",
        )
    numbers = [number_of[id(parameter)] for parameter in own]
    names = list(named)
    return numbers, [names[number] for number in numbers]


def _has_stepped(state: Mapping[str, Any]) -> bool:
    # Adagrad has state from the start, and counts steps in it.
    return float(state["step"]) > 0 if "step" in state else bool(state)


def check_session(session: Session) -> None:
    """Raise if ranks or samples are already divided in another way.

    Raises:
        ConfigurationError: names the earlier call.
    """
    if session.axes is not None:
        raise ConfigurationError(
            f"parameter_server uses all ranks and cannot be combined with a mesh ({session.axes}).",
            do="omit rankwise.mesh()",
        )
    if session.loop is not None:
        raise ConfigurationError(
            "parameter_server() was already called in this world.", do="train one model with parameter servers"
        )
    if session.data_parts is not None and session.world.world_size > 1:
        raise ConfigurationError(
            f"parameter_server() was called after {session.data_parts}, which assumed that every rank has samples.",
            do="call parameter_server() first, then create the rankwise.DataLoader",
        )
