# SPDX-License-Identifier: Apache-2.0
"""``hvd.elastic``: trainings that continue after ranks or machines are lost."""

from __future__ import annotations

from rankwise.compat.horovod.elastic.running import run, run_fn
from rankwise.compat.horovod.elastic.sampler import ElasticSampler
from rankwise.compat.horovod.elastic.state import ObjectState, State, TorchState
from rankwise.compat.horovod.errors import NotOffered

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run", "run_fn"]


def __getattr__(name: str) -> object:
    """Raise an error that names a replacement, or the names that are offered."""
    if name == "notification_manager":
        raise NotOffered(
            f"hvd.elastic does not offer {name!r}.",
            do="omit it: State.check_host_updates() notices machines that joined or left",
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
