# SPDX-License-Identifier: Apache-2.0
"""rankwise: one PyTorch training script on any number of ranks, with the result one rank would give."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from rankwise.version import VERSION
from rankwise.world import torch_versions

if TYPE_CHECKING:
    from rankwise.checkpoint.checkpointer import Checkpointer
    from rankwise.checkpoint.export import save_weights
    from rankwise.checkpoint.import_weights import load_weights
    from rankwise.checkpoint.load import load
    from rankwise.checkpoint.save import save
    from rankwise.comm.agreement import all_ranks_succeed, local_rank_zero_first
    from rankwise.comm.collectives import (
        all_gather,
        all_gather_object,
        all_gather_uneven,
        all_reduce,
        all_to_all,
        barrier,
        broadcast,
        broadcast_object,
        mean,
        new_group,
        reduce_scatter,
        whole_batch,
    )
    from rankwise.comm.collectives.logged_values import log_value
    from rankwise.comm.join import join
    from rankwise.comm.leave import leave
    from rankwise.comm.optimizer_steps import independent
    from rankwise.comm.point_to_point.send_recv import recv, send
    from rankwise.compress.methods import PowerSGD, TopK
    from rankwise.data.loader import DataLoader
    from rankwise.data.sampler import ShardedSampler
    from rankwise.data.shared import share
    from rankwise.launch.function.launch import launch, launcher
    from rankwise.local_sgd.local_sgd import local_sgd
    from rankwise.local_sgd.outer import DiLoCo
    from rankwise.log import log
    from rankwise.parameter_server.parameter_server import parameter_server
    from rankwise.pipeline.pipeline import pipeline
    from rankwise.place.place import place, placement
    from rankwise.progress import print, progress  # noqa: A004 - prints on rank zero
    from rankwise.replicate.device_mesh import mesh
    from rankwise.replicate.no_sync_and_weight import no_sync, weight
    from rankwise.replicate.random_numbers.as_one_rank import as_one_rank
    from rankwise.replicate.replicate import replicate
    from rankwise.shard.shard import shard
    from rankwise.tensor_parallel.tensor_parallel import plan_of, tensor_parallel
    from rankwise.world.facts import World

__version__ = VERSION
torch_versions.check()
_ROOM_OF = {
    "Checkpointer": "checkpoint.checkpointer",
    "DataLoader": "data.loader",
    "DiLoCo": "local_sgd.outer",
    "PowerSGD": "compress.methods",
    "ShardedSampler": "data.sampler",
    "TopK": "compress.methods",
    "World": "world.facts",
    "all_gather": "comm.collectives",
    "all_gather_object": "comm.collectives",
    "all_gather_uneven": "comm.collectives",
    "all_ranks_succeed": "comm.agreement",
    "all_reduce": "comm.collectives",
    "all_to_all": "comm.collectives",
    "as_one_rank": "replicate.random_numbers.as_one_rank",
    "barrier": "comm.collectives",
    "broadcast": "comm.collectives",
    "broadcast_object": "comm.collectives",
    "independent": "comm.optimizer_steps",
    "join": "comm.join",
    "launch": "launch.function.launch",
    "launcher": "launch.function.launch",
    "leave": "comm.leave",
    "load": "checkpoint.load",
    "load_weights": "checkpoint.import_weights",
    "local_rank_zero_first": "comm.agreement",
    "local_sgd": "local_sgd.local_sgd",
    "log": "log",
    "log_value": "comm.collectives.logged_values",
    "mean": "comm.collectives",
    "mesh": "replicate.device_mesh",
    "new_group": "comm.collectives",
    "no_sync": "replicate.no_sync_and_weight",
    "parameter_server": "parameter_server.parameter_server",
    "pipeline": "pipeline.pipeline",
    "place": "place.place",
    "placement": "place.place",
    "plan_of": "tensor_parallel.tensor_parallel",
    "print": "progress",
    "progress": "progress",
    "recv": "comm.point_to_point.send_recv",
    "reduce_scatter": "comm.collectives",
    "replicate": "replicate.replicate",
    "save": "checkpoint.save",
    "save_weights": "checkpoint.export",
    "send": "comm.point_to_point.send_recv",
    "shard": "shard.shard",
    "share": "data.shared",
    "tensor_parallel": "tensor_parallel.tensor_parallel",
    "weight": "replicate.no_sync_and_weight",
    "whole_batch": "comm.collectives",
}

# The first import of a module binds its name here, and some have the name of a function, which __getattr__ binds.
for _name in _ROOM_OF.keys() & {module.split(".")[0] for module in _ROOM_OF.values()}:
    importlib.import_module(f"rankwise.{_name}")
    del globals()[_name]

__all__ = [
    "Checkpointer",
    "DataLoader",
    "DiLoCo",
    "PowerSGD",
    "ShardedSampler",
    "TopK",
    "World",
    "all_gather",
    "all_gather_object",
    "all_gather_uneven",
    "all_ranks_succeed",
    "all_reduce",
    "all_to_all",
    "as_one_rank",
    "barrier",
    "broadcast",
    "broadcast_object",
    "independent",
    "join",
    "launch",
    "launcher",
    "leave",
    "load",
    "load_weights",
    "local_rank_zero_first",
    "local_sgd",
    "log",
    "log_value",
    "mean",
    "mesh",
    "new_group",
    "no_sync",
    "parameter_server",
    "pipeline",
    "place",
    "placement",
    "plan_of",
    "print",
    "progress",
    "recv",
    "reduce_scatter",
    "replicate",
    "save",
    "save_weights",
    "send",
    "shard",
    "share",
    "tensor_parallel",
    "weight",
    "whole_batch",
]


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that the command line does not import torch."""
    if name not in _ROOM_OF:
        raise _missing(name)
    thing = getattr(importlib.import_module(f"rankwise.{_ROOM_OF[name]}"), name)
    globals()[name] = thing
    return thing


def _missing(name: str) -> AttributeError | ImportError:
    """Return the error for a name that rankwise does not have. Called by ``__getattr__`` only."""
    from rankwise.health.wrong_calls import instead_of  # noqa: PLC0415 - for errors only

    importing = sys._getframe(2).f_code.co_name == "_handle_fromlist"  # noqa: SLF001 - there is no public name
    if importing and importlib.util.find_spec(f"rankwise.{name}") is None:
        # Python would replace an AttributeError by its own error.
        return ImportError(f"cannot import name {name!r} from 'rankwise': {instead_of(name, __all__)}", name="rankwise")
    # With a name it gets no second hint from Python.
    return AttributeError(f"module 'rankwise' has no attribute {name!r}: {instead_of(name, __all__)}", name=name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
