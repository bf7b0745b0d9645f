# SPDX-License-Identifier: Apache-2.0
"""Inside Ray Train: its workers are the ranks, and meet where they agree through Ray.

TorchTrainer has opened a process group before the training function runs; rankwise opens its own in place of it, which
it can follow and close. Never imports Ray in a process that has not. Imported by ``join``.
"""

from __future__ import annotations

import importlib
import secrets
import socket
import sys
import warnings
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from rankwise.errors import ConfigurationError
from rankwise.world.environments.reading import Reading

SOURCE = "ray"


@dataclass(frozen=True, kw_only=True, slots=True)
class RayWorkers:
    """The workers of Ray Train as ranks."""

    reading: Reading
    reserved: socket.socket | None
    """Reserves the port of the store on rank 0, until the store listens there."""

    def release(self) -> None:
        """Close the reservation: the store listens, or never will."""
        if self.reserved is not None:
            self.reserved.close()


def take_over() -> RayWorkers | None:
    """Close the group that Ray Train has opened for its workers, and return where they meet; ``None`` elsewhere.

    Called by: every worker.

    Raises:
        ConfigurationError: this Ray Train cannot tell its workers where to meet.

    Source: ray.train.get_context, and ray.train.collective, which Ray Train has since its second version.
    """
    context = _context()
    if context is None:
        return None
    try:
        broadcast = importlib.import_module("ray.train.collective").broadcast_from_rank_zero
    except ImportError as error:
        if not _is_in_session(context):
            return None
        raise ConfigurationError(
            "rankwise joins workers of Ray Train's second version only.",
            evidence=str(error),
            do="set RAY_TRAIN_V2_ENABLED=1, or install a newer Ray",
        ) from None
    rank, reserved = int(context.get_world_rank()), None
    told: tuple[str, int, str] | None = None
    if rank == 0:
        host = str(importlib.import_module("ray.util").get_node_ip_address())
        # A socket that does not listen: the store may, on the same port, while no other program is assigned it.
        reserved = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((host, 0))
        told = host, reserved.getsockname()[1], secrets.token_hex()
    host, port, secret = broadcast(told)
    # Every worker is here: none still opens the group, or uses it.
    if dist.is_initialized():
        dist.destroy_process_group()
    size = int(context.get_world_size())
    reading = Reading(
        rank=rank,
        world_size=size,
        source=SOURCE,
        reason=f"Ray Train: worker {rank} of {size}, because it runs this function",
        local_rank=int(context.get_local_rank()),
        local_world_size=int(context.get_local_world_size()),
        node_rank=int(context.get_node_rank()),
        address=(host, port),
        secret=secret,
    )
    return RayWorkers(reading=reading, reserved=reserved)


def _context() -> Any:
    """Return what Ray Train tells of this worker; ``None`` if this process is none of its workers."""
    train = sys.modules.get("ray.train")
    try:
        return None if train is None else train.get_context()
    except Exception:  # noqa: BLE001 - outside of a worker it is an error of one kind or another
        return None


def _is_in_session(context: Any) -> bool:
    """Return whether a context of Ray Train's first version, which every process has, is that of a worker."""
    with warnings.catch_warnings():
        # Ray warns of a call outside of a worker, which returns None.
        warnings.simplefilter("ignore")
        return context.get_experiment_name() is not None
