# SPDX-License-Identifier: Apache-2.0
"""``import megengine`` without MegEngine: an alias that a program requests by :func:`provide`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from rankwise.compat import import_alias
from rankwise.compat.import_alias import ImportAlias

_PACKAGE = "rankwise.compat.megengine"

_MODULES = (
    "autodiff",
    "autodiff.grad_manager",
    "data",
    "data.collator",
    "data.dataloader",
    "data.dataset",
    "data.sampler",
    "data.transform",
    "device",
    "distributed",
    "distributed.functional",
    "distributed.helper",
    "functional",
    "functional.distributed",
    "functional.loss",
    "functional.nn",
    "module",
    "optimizer",
    "tensor",
)
"""What a script may import below ``megengine``."""
_ELSEWHERE = {
    "distributed.helper": "device",
    # In MegEngine `mge.tensor` is a function and `megengine.tensor` a module; here the function's module has its name.
    "tensor": "tensors",
}
"""Modules that have another name here."""
_INSTEAD = {
    "megengine.data.dataset.vision": "use torchvision.datasets, or megengine.data.dataset.ArrayDataset of the arrays",
    "megengine.data.transform.vision": "use torchvision.transforms in a subclass of megengine.data.transform.Transform",
    "megengine.jit": "use torch.compile",
    "megengine.amp": "use torch.amp",
    "megengine.hub": "use torch.hub",
    "megengine.random": "use torch.rand and related functions",
    "megengine.quantization": "use torch.ao.quantization",
}
"""Modules that are not offered, and what to use instead."""
_ALIAS = ImportAlias(
    name="megengine",
    library="MegEngine",
    package=_PACKAGE,
    usual_import="import rankwise.compat.megengine as mge",
    on_path=str(Path(__file__).parent / "on_path"),
    modules={f"megengine.{name}": f"{_PACKAGE}.{_ELSEWHERE.get(name, name)}" for name in _MODULES},
    instead=_INSTEAD,
)


def provide() -> None:
    """Make ``import megengine`` give :mod:`rankwise.compat.megengine`, from now on in this process.

    Ranks of ``dist.launcher`` and processes that multiprocessing starts have it too. Calling it again does nothing.

    Raises:
        ConfigurationError: MegEngine itself is installed here, or has been imported already.
    """
    import_alias.provide(_ALIAS)


def register() -> None:
    """Add the modules to ``sys.modules``. Called by the package in ``on_path`` when it is first imported."""
    sys.modules["megengine"] = importlib.import_module(_PACKAGE)
    import_alias.register(_ALIAS)
