# SPDX-License-Identifier: Apache-2.0
"""``megengine.distributed`` on rankwise: ``import rankwise.compat.megengine.distributed as dist``."""

from __future__ import annotations

from rankwise.compat.megengine import device as helper
from rankwise.compat.megengine.alias import refusing
from rankwise.compat.megengine.distributed import functional
from rankwise.compat.megengine.distributed.groups import (
    WORLD,
    AllreduceCallback,
    Group,
    bcast_list_,
    get_backend,
    get_rank,
    get_world_size,
    group_barrier,
    is_distributed,
    make_allreduce_cb,
    new_group,
    override_backend,
    synchronized,
)
from rankwise.compat.megengine.distributed.starting import Client, Server, get_client, init_process_group, launcher

__all__ = [
    "WORLD",
    "AllreduceCallback",
    "Client",
    "Group",
    "Server",
    "bcast_list_",
    "functional",
    "get_backend",
    "get_client",
    "get_rank",
    "get_world_size",
    "group_barrier",
    "helper",
    "init_process_group",
    "is_distributed",
    "launcher",
    "make_allreduce_cb",
    "new_group",
    "override_backend",
    "synchronized",
]

_ADDRESS = "dist.get_client() for values of your own: the store of the ranks has a secret and no public address"
_NOT_OFFERED = {
    "get_mm_server_addr": _ADDRESS,
    "get_py_server_addr": _ADDRESS,
    "backend": "the argument backend= of dist.launcher; dist.get_backend() returns the backend in use",
    "group_start": "one collective after another, or a list of tensors in rankwise.all_reduce()",
    "group_end": "one collective after another, or a list of tensors in rankwise.all_reduce()",
}

__getattr__ = refusing("megengine.distributed", __all__, _NOT_OFFERED.get)
