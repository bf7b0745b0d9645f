# SPDX-License-Identifier: Apache-2.0
"""``hvd.elastic``: trainings that go on after ranks and machines are lost."""

from __future__ import annotations

from rankwise.compat.horovod.elastic.running import run
from rankwise.compat.horovod.elastic.sampler import ElasticSampler
from rankwise.compat.horovod.elastic.state import ObjectState, State
from rankwise.compat.horovod.elastic.torch_state import TorchState

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]
