# SPDX-License-Identifier: Apache-2.0
"""``hvd.elastic``: trainings that go on after ranks and machines are lost."""

from __future__ import annotations

from rankwise.compat.horovod.elastic.running import run
from rankwise.compat.horovod.elastic.sampler import ElasticSampler
from rankwise.compat.horovod.elastic.state import ObjectState, State
from rankwise.compat.horovod.elastic.torch_state import TorchState
from rankwise.compat.horovod.errors import NotOffered

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]


def __getattr__(name: str) -> object:
    """Say what takes the place of a name that is not here."""
    if name == "run_fn":
        raise NotOffered("hvd.elastic does not offer 'run_fn'.", do="decorate the function with hvd.elastic.run")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
