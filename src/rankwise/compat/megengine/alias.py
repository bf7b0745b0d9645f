# SPDX-License-Identifier: Apache-2.0
"""``import megengine`` without MegEngine: an alias that a program requests by :func:`provide`.

The names are entries of ``sys.modules`` that lead to this package's own modules. ``on_path`` is found by ``sys.path``,
which ranks of ``dist.launcher`` and processes of multiprocessing receive, so the alias works there too.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec

ALIAS = "megengine"
PACKAGE = "rankwise.compat.megengine"
_ON_PATH = str(Path(__file__).parent / "on_path")

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
"""Modules whose names are found in another one here."""
_INSTEAD = {
    "data.dataset.vision": "torchvision.datasets, or megengine.data.dataset.ArrayDataset of the arrays",
    "data.transform.vision": "torchvision.transforms in a subclass of megengine.data.transform.Transform",
    "jit": "torch.compile",
    "amp": "torch.amp",
    "hub": "torch.hub",
    "random": "torch.rand and its kin",
    "quantization": "torch.ao.quantization",
}
"""What takes the place of a module that is not offered."""


def provide() -> None:
    """Make ``import megengine`` give :mod:`rankwise.compat.megengine`, from now on in this process.

    Ranks of ``dist.launcher`` and processes that multiprocessing starts have it too. Calling it again does nothing.

    Raises:
        ConfigurationError: MegEngine itself is installed here, or has been imported already.
    """
    present = sys.modules.get(ALIAS)
    if present is not None:
        if present is sys.modules.get(PACKAGE):
            return
        raise _both_exist(f"it has been imported from {getattr(present, '__file__', None) or 'elsewhere'}")
    found = importlib.machinery.PathFinder.find_spec(ALIAS, [one for one in sys.path if one != _ON_PATH])
    # A folder of that name without an __init__.py is not MegEngine, and this alias precedes it.
    if found is not None and found.origin is not None:
        raise _both_exist(f"it is installed: {found.origin}")
    if _ON_PATH not in sys.path:
        sys.path.append(_ON_PATH)
    importlib.invalidate_caches()
    importlib.import_module(ALIAS)


def register() -> None:
    """Enter the modules. Called by the package in ``on_path`` when it is first imported."""
    sys.modules[ALIAS] = importlib.import_module(PACKAGE)
    for name in _MODULES:
        sys.modules[f"{ALIAS}.{name}"] = importlib.import_module(f"{PACKAGE}.{_ELSEWHERE.get(name, name)}")
    sys.meta_path.insert(0, _Refusing())


class _Refusing:
    """Finds no module: names what to use in place of a module that this alias lacks."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        """Raise for what is below ``megengine``, since what is offered has been imported; leave the rest to others."""
        del path, target
        if not name.startswith(f"{ALIAS}."):
            return None
        below = name.removeprefix(f"{ALIAS}.")
        instead = next((f"use {text}" for known, text in _INSTEAD.items() if f"{below}.".startswith(f"{known}.")), None)
        message = f"rankwise stands in for MegEngine and has no {name}: {instead or 'it has ' + ', '.join(_MODULES)}"
        raise ModuleNotFoundError(message, name=name)


def _both_exist(evidence: str) -> ConfigurationError:
    return ConfigurationError(
        "The name `megengine` was requested for rankwise.compat.megengine, but MegEngine itself is present.",
        evidence=evidence,
        do="write `import rankwise.compat.megengine as mge` in the script, or run it where MegEngine is not installed",
    )
