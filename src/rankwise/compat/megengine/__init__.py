# SPDX-License-Identifier: Apache-2.0
"""MegEngine's words for training on several ranks, on torch's tensors and modules.

``import rankwise.compat.megengine as mge`` gives ``mge.distributed``, ``mge.functional.distributed``,
``mge.autodiff.GradManager`` and ``mge.data``'s samplers. What computes (layers, optimizers, tensors) is torch's.
"""

from __future__ import annotations

import importlib
from typing import Any

from rankwise.compat.megengine.not_offered import refused

_ROOMS = ("autodiff", "data", "device", "distributed", "functional")
_NOT_OFFERED = {
    "Parameter": "torch.nn.Parameter",
    "Tensor": "torch.Tensor",
    "amp": "torch.amp",
    "hub": "torch.hub",
    "jit": "torch.compile",
    "load": "torch.load, or rankwise.Checkpointer",
    "module": "torch.nn",
    "optimizer": "torch.optim",
    "save": "torch.save, or rankwise.Checkpointer",
    "tensor": "torch.tensor",
}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever the name stands for
    if name in _ROOMS:
        return importlib.import_module(f"{__name__}.{name}")
    raise not_here(name)


def not_here(name: str) -> Exception:
    """Return what to raise where ``megengine.name`` is asked for, and is not here."""
    return refused("megengine", name, _NOT_OFFERED, _ROOMS)


def __dir__() -> list[str]:
    return list(_ROOMS)
