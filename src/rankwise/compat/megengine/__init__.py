# SPDX-License-Identifier: Apache-2.0
"""MegEngine's API for training on several ranks, on torch's tensors and modules.

``import rankwise.compat.megengine as mge`` gives ``mge.distributed``, ``mge.functional.distributed``,
``mge.autodiff.GradManager``, ``mge.data`` and ``mge.optimizer``. Layers and tensors are torch's. ``alias`` makes
``import megengine`` give the same.
"""

from __future__ import annotations

import importlib
from typing import Any

from rankwise.compat.megengine.alias import provide, refused

_ROOMS = ("autodiff", "data", "device", "distributed", "functional", "module", "optimizer")
_OF_TENSORS = ("Parameter", "tensor")
_NOT_OFFERED = {
    "Tensor": "torch.Tensor",
    "amp": "torch.amp",
    "hub": "torch.hub",
    "jit": "torch.compile",
    "load": "torch.load, or rankwise.Checkpointer",
    "save": "torch.save, or rankwise.Checkpointer",
}


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _OF_TENSORS:
        return getattr(importlib.import_module(f"{__name__}.tensors"), name)
    raise refused("megengine", name, __dir__(), _NOT_OFFERED.get(name))


def __dir__() -> list[str]:
    return [*_ROOMS, *_OF_TENSORS, provide.__name__]
