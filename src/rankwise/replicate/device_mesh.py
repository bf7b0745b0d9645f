# SPDX-License-Identifier: Apache-2.0
"""The axes of this session: how ranks are laid out, torch's groups along each axis, and rankwise's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rankwise.comm.agreement import all_ranks_succeed
from rankwise.comm.collectives import gather_json
from rankwise.comm.session import current
from rankwise.errors import ConfigurationError, fold_values
from rankwise.health.call_site import user_call_site, words
from rankwise.log import log, warn
from rankwise.meter import note_layout
from rankwise.torch_private.groups import mesh_groups
from rankwise.world.device.choice import HOST, choose_backend, goes_through_host
from rankwise.world.device.kinds import is_accelerator, type_of
from rankwise.world.mesh import NAMES, Axes, axes_of

if TYPE_CHECKING:
    from rankwise.comm.backends.protocol import Exchange
    from rankwise.world.facts import World

_THROUGH_TORCH = {"shard", "pipeline", "tensor_parallel"}
"""Strategies that exchange through torch's own groups on the device."""


def mesh(*, worker_groups: int = 1, dp_replicate: int = 1, dp_shard: int = 1, pp: int = 1, tp: int = 1) -> DeviceMesh:
    """Lay the ranks out along axes, for every strategy and loader that follows.

    Called by: every rank, with the same sizes, once, right after :func:`rankwise.join`. Not needed if one strategy uses
    all ranks: :func:`rankwise.replicate`, ``shard``, ``pipeline`` and ``tensor_parallel`` do so by default.

    Afterwards ``tensor_parallel`` splits layers over ``tp``; ``replicate`` averages over ``dp_replicate``; ``shard``
    over ``dp_replicate`` and ``dp_shard``; ``pipeline`` has its stages along ``pp`` and averages over
    ``dp_replicate``. None of them averages over ``worker_groups``: that is :func:`rankwise.local_sgd`, which needs
    them. :class:`rankwise.DataLoader` gives ranks that differ only in ``pp`` or ``tp`` the same samples. Ranks along
    ``tp`` are neighbours, then those along ``dp_shard``, ``dp_replicate``, ``pp`` and ``worker_groups``.

    Args:
        worker_groups: groups of ranks with a slow network between them. Ranks of one worker group have consecutive
            numbers: start them host by host.
        dp_replicate: copies of the model.
        dp_shard: parts that its parameters are sharded into.
        pp: stages of a pipeline.
        tp: parts of each layer. One of the five may be -1, for the remaining ranks.

    Returns:
        torch's mesh, with the dimensions ``worker_groups``, ``pp``, ``dp_replicate``, ``dp_shard``, ``tp``.

    Raises:
        ConfigurationError: the product of the sizes is not the world size, ranks gave different sizes, or the ranks
            are laid out already.
        NotJoined: before :func:`rankwise.join`.

    Source: torch.distributed.device_mesh.init_device_mesh.
    """
    sizes = {"worker_groups": worker_groups, "dp_replicate": dp_replicate, "dp_shard": dp_shard, "pp": pp, "tp": tp}
    return _lay_out({name: size for name, size in sizes.items() if size != 1}, "rankwise.mesh()")


def axes_for(strategy: str, axis: str) -> Axes:
    """Return the session's axes; where none were laid out, put every rank on ``axis``.

    Called by: every rank.

    Args:
        strategy: the name of the strategy: ``"shard"``.
        axis: the axis that it spreads a model along.

    Raises:
        ConfigurationError: the ranks can no longer be laid out, or no backend of torch carries tensors of their
            device, which this strategy needs.
    """
    session = current()
    if strategy in _THROUGH_TORCH:
        with all_ranks_succeed(f"rankwise.{strategy}()"):
            _check_carried(session.world, f"{strategy}()")
    if session.axes is None:
        _lay_out({axis: session.world.world_size}, f"rankwise.{strategy}()")
    return _axes()


def submesh(*names: str) -> DeviceMesh:
    """Return torch's mesh of the ranks that differ from this one along ``names`` only."""
    device_mesh = current().device_mesh
    if not isinstance(device_mesh, DeviceMesh):
        raise _no_mesh()
    return device_mesh[names]


def exchange_along(*names: str) -> Exchange | None:
    """Return the exchange of the ranks that differ along ``names`` only; ``None`` if there is only this rank.

    Called by: every rank, in the same order.
    """
    session = current()
    groups = _axes().groups_along(*names)
    if session.exchange is None or len(groups[0]) == 1:
        return None
    if len(groups) == 1:
        return session.exchange
    part = session.parts.get(names)
    if part is None:
        session.parts[names] = part = session.exchange.split(groups)
    return part


def _axes() -> Axes:
    axes = current().axes
    if axes is None:
        raise _no_mesh()
    return axes


def _no_mesh() -> ConfigurationError:
    return ConfigurationError("The ranks have no mesh.", do="call rankwise.mesh() first")


def _lay_out(sizes: dict[str, int], caller: str) -> DeviceMesh:
    session = current()
    with all_ranks_succeed(caller, call=caller):
        axes = axes_of(session.world.world_size, sizes)
        _refuse_if_laid_out(caller, axes)
    of_rank = gather_json(str(axes), what=caller)
    if len(set(of_rank)) > 1:
        raise ConfigurationError(
            f"{caller} received different sizes on different ranks.",
            where=f"reported on {session.world}",
            evidence=fold_values(dict(enumerate(of_rank))),
            do="pass the same sizes on every rank",
        )
    session.open_group()
    world = session.world
    is_carried = world.backend == "none" or not goes_through_host(world.device, world.backend)
    device_type = type_of(world.device) if is_carried else "cpu"
    with mesh_groups():
        device_mesh = init_device_mesh(device_type, tuple(axes.size(name) for name in NAMES), mesh_dim_names=NAMES)
    session.lay_out(axes, device_mesh, by=f"{caller} at {words(user_call_site())}")
    if world.rank == 0:
        note_layout("mesh", axes={name: axes.size(name) for name in NAMES if axes.size(name) > 1})
    if axes.worker_groups > 1:
        session.before_save(_check_worker_groups_meet)
        session.on_leave(_warn_unless_worker_groups_meet)
    if session.world.world_size > 1:
        log(f"mesh: {axes}")
    return device_mesh


def _check_carried(world: World, caller: str) -> None:
    backend = choose_backend(None, world.device) if world.backend == "none" else world.backend
    kind = type_of(world.device)
    # Gloo reduces and broadcasts tensors of a GPU, and crashes where it is to send or gather them.
    if goes_through_host(world.device, backend) or (is_accelerator(kind) and backend == HOST):
        raise ConfigurationError(
            f"{caller} needs a torch backend that supports {kind} tensors, and {backend} does not.",
            do="use rankwise.replicate(), which exchanges through host memory, or rankwise.join(device='cpu'), "
            "or the backend of the device if torch has one",
        )


def _do_worker_groups_meet() -> bool:
    return current().are_worker_groups_averaged


def _check_worker_groups_meet() -> None:
    if not _do_worker_groups_meet():
        raise ConfigurationError(
            "The worker groups train independently, and a checkpoint would contain the state of the first one only.",
            evidence=f"the mesh is {current().axes}, and local_sgd() was not called",
            do="call rankwise.local_sgd(model, every=...) before training, or create the mesh without worker groups",
        )


def _warn_unless_worker_groups_meet() -> None:
    if not _do_worker_groups_meet():
        warn(
            "the mesh has worker groups, but local_sgd() was not called: nothing was averaged between them; call "
            "rankwise.local_sgd(model, every=...) before training"
        )


def _refuse_if_laid_out(caller: str, axes: Axes) -> None:
    session = current()
    if session.axes is not None:
        raise ConfigurationError(
            f"{caller} was called after the ranks were laid out.",
            evidence=f"{session.laid_out_by} laid them out: {session.axes}",
            do="call rankwise.mesh() once, right after rankwise.join(), with the axes of all strategies",
        )
    if session.data_parts is not None and axes.data_world_size != session.world.world_size:
        raise ConfigurationError(
            f"{caller} was called after {session.data_parts}, which assumed that every rank has its own samples.",
            do="create the mesh first: call rankwise.mesh() right after rankwise.join()",
        )
