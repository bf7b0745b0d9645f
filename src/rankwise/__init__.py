# SPDX-License-Identifier: Apache-2.0
"""rankwise: one PyTorch training script on any number of ranks, with the result one rank would give."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rankwise import torch_versions
from rankwise.version import VERSION

if TYPE_CHECKING:
    from rankwise.agreement import rank_zero_first
    from rankwise.checkpoint.checkpointer import Checkpointer
    from rankwise.checkpoint.export import save_weights
    from rankwise.checkpoint.import_weights import load_weights
    from rankwise.checkpoint.load import load
    from rankwise.checkpoint.save import save
    from rankwise.collectives import (
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
    )
    from rankwise.data.loader import DataLoader
    from rankwise.data.sampler import ShardedSampler
    from rankwise.data.shared import share
    from rankwise.launch.function import launch, launcher
    from rankwise.log import log
    from rankwise.parallel.compress.methods import PowerSGD, TopK
    from rankwise.parallel.device_mesh import mesh
    from rankwise.parallel.local_sgd.calls import local_sgd
    from rankwise.parallel.local_sgd.outer import DiLoCo
    from rankwise.parallel.pipeline.calls import pipeline
    from rankwise.parallel.place.calls import place, placement
    from rankwise.parallel.randomness.calls import as_one_rank
    from rankwise.parallel.replicate import replicate
    from rankwise.parallel.server.calls import parameter_server
    from rankwise.parallel.shard.calls import shard
    from rankwise.parallel.tensor.calls import tensor_parallel
    from rankwise.parallel.threads import data_parallel
    from rankwise.parallel.trained import no_sync, weight
    from rankwise.point_to_point.calls import recv, send
    from rankwise.process_group import join, leave
    from rankwise.progress import print, progress  # noqa: A004 - prints on rank zero
    from rankwise.steps import independent
    from rankwise.world import World

__version__ = VERSION
torch_versions.check()

_ROOM_OF = {
    "Checkpointer": "checkpoint.checkpointer",
    "DataLoader": "data.loader",
    "DiLoCo": "parallel.local_sgd.outer",
    "PowerSGD": "parallel.compress.methods",
    "ShardedSampler": "data.sampler",
    "TopK": "parallel.compress.methods",
    "World": "world",
    "all_gather": "collectives",
    "all_gather_object": "collectives",
    "all_gather_uneven": "collectives",
    "all_reduce": "collectives",
    "all_to_all": "collectives",
    "as_one_rank": "parallel.randomness.calls",
    "barrier": "collectives",
    "broadcast": "collectives",
    "broadcast_object": "collectives",
    "data_parallel": "parallel.threads",
    "independent": "steps",
    "join": "process_group",
    "launch": "launch.function",
    "launcher": "launch.function",
    "leave": "process_group",
    "load": "checkpoint.load",
    "load_weights": "checkpoint.import_weights",
    "local_sgd": "parallel.local_sgd.calls",
    "log": "log",
    "mean": "collectives",
    "mesh": "parallel.device_mesh",
    "new_group": "collectives",
    "no_sync": "parallel.trained",
    "parameter_server": "parallel.server.calls",
    "pipeline": "parallel.pipeline.calls",
    "place": "parallel.place.calls",
    "placement": "parallel.place.calls",
    "print": "progress",
    "progress": "progress",
    "rank_zero_first": "agreement",
    "recv": "point_to_point.calls",
    "reduce_scatter": "collectives",
    "replicate": "parallel.replicate",
    "save": "checkpoint.save",
    "save_weights": "checkpoint.export",
    "send": "point_to_point.calls",
    "shard": "parallel.shard.calls",
    "share": "data.shared",
    "tensor_parallel": "parallel.tensor.calls",
    "weight": "parallel.trained",
}

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
    "all_reduce",
    "all_to_all",
    "as_one_rank",
    "barrier",
    "broadcast",
    "broadcast_object",
    "data_parallel",
    "independent",
    "join",
    "launch",
    "launcher",
    "leave",
    "load",
    "load_weights",
    "local_sgd",
    "log",
    "mean",
    "mesh",
    "new_group",
    "no_sync",
    "parameter_server",
    "pipeline",
    "place",
    "placement",
    "print",
    "progress",
    "rank_zero_first",
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
]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever the name stands for
    """Import a public name when it is first used: the command line answers without importing torch."""
    if name not in _ROOM_OF:
        raise AttributeError(f"module 'rankwise' has no attribute {name!r}; it has {', '.join(__all__)}")
    thing = getattr(importlib.import_module(f"rankwise.{_ROOM_OF[name]}"), name)
    globals()[name] = thing
    return thing


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


class _Package(ModuleType):
    """Keeps a public name from being replaced by the module of the same name, which importing would bind."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _ROOM_OF and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        """Let a pickled function name this package, as it may name any other module."""
        return importlib.import_module, (self.__name__,)


sys.modules[__name__].__class__ = _Package
