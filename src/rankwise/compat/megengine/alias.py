# SPDX-License-Identifier: Apache-2.0
"""``import megengine`` without MegEngine: an alias that a program requests by :func:`provide`.

And the errors for MegEngine's names that are not offered, which name a replacement.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankwise.compat import import_alias
from rankwise.compat.import_alias import ImportAlias
from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

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
    "autodiff.grad_manager": "autodiff",
    "data.collator": "data.dataloader",
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


def refusing(module: str, offered: Iterable[str], instead: Callable[[str], str | None] | str) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module, which raises for every name.

    Args:
        module: its name in MegEngine: ``"megengine.data"``.
        offered: its names.
        instead: returns what to use in place of a name of MegEngine; or one text for all names.
    """

    def refuse(name: str) -> Any:
        if isinstance(instead, str):
            raise refused(module, name, offered, None if name.startswith("__") else instead)
        raise refused(module, name, offered, instead(name))

    return refuse


def refused(module: str, name: str, offered: Iterable[str], instead: str | None) -> Exception:
    """Return the error for one name; arguments as for :func:`refusing`."""
    if instead is None:
        return AttributeError(f"rankwise's {module} has no {name!r}; it has {', '.join(sorted(offered))}")
    # Not an AttributeError: `from ... import name` would replace its text.
    return ConfigurationError(
        f"{module}.{name} is not offered here: rankwise provides only MegEngine's functions for several ranks.",
        do=f"use {instead}",
    )
