# SPDX-License-Identifier: Apache-2.0
"""``import horovod.torch`` without Horovod: an alias that a program asks for by :func:`provide`.

The names are entries of ``sys.modules`` that lead to this package's own modules. The processes that multiprocessing
starts afresh find them too: what ``on_path`` holds is found by ``sys.path``, which they are given.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from rankwise.compat.horovod.launching import run
from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec

INTERFACE_VERSION = "0.28.1"
"""Of the Horovod whose interface is offered; what ``horovod.__version__`` says."""
ON_PATH = str(Path(__file__).parent / "on_path")
"""The folder that a process imports ``horovod`` from; after everything else that it imports from, where it can be."""
_PACKAGE = "rankwise.compat.horovod"

_MODULES = {
    "horovod.torch": _PACKAGE,
    "horovod.torch.compression": _PACKAGE,
    "horovod.torch.functions": _PACKAGE,
    "horovod.torch.mpi_ops": _PACKAGE,
    "horovod.torch.optimizer": _PACKAGE,
    "horovod.torch.sync_batch_norm": _PACKAGE,
    "horovod.torch.elastic": f"{_PACKAGE}.elastic",
    "horovod.torch.elastic.sampler": f"{_PACKAGE}.elastic.sampler",
    "horovod.torch.elastic.state": f"{_PACKAGE}.elastic.torch_state",
    "horovod.common.elastic": f"{_PACKAGE}.elastic",
    "horovod.common.exceptions": f"{_PACKAGE}.exceptions",
    "horovod.common.process_sets": _PACKAGE,
    "horovod.common.util": f"{_PACKAGE}.extensions",
}
"""What a script may import, and what it gets."""

_OTHER_ARRAYS = "rankwise.all_reduce() and the other collectives take arrays of other frameworks, gradients too"
_INSTEAD = {
    "horovod.tensorflow": _OTHER_ARRAYS,
    "horovod.keras": _OTHER_ARRAYS,
    "horovod.mxnet": _OTHER_ARRAYS,
    "horovod.spark": "start the job by `rankwise run --hosts a,b`, or from Python by rankwise.launch()",
    "horovod.ray": "start the job by `rankwise run --hosts a,b`, or from Python by rankwise.launch()",
    "horovod.run": "type `rankwise horovodrun`, or start ranks from Python by horovod.run()",
    "horovod.runner": "type `rankwise horovodrun`, or start ranks from Python by horovod.run()",
    "horovod.data": "read ahead with torch.utils.data.DataLoader(num_workers=...)",
}
"""What is not offered, and what is there in its place."""


def provide() -> None:
    """Have ``import horovod.torch`` and its like give :mod:`rankwise.compat.horovod`, from now on in this process.

    Processes that multiprocessing starts have it too. Calling it again does nothing.

    Raises:
        ConfigurationError: Horovod itself is installed here, or has been imported already.
    """
    present = sys.modules.get("horovod")
    if present is not None:
        if _is_ours(present.__spec__):
            return
        raise _there_are_two(f"it has been imported from {getattr(present, '__file__', None) or 'elsewhere'}")
    _check_installed()
    if ON_PATH not in sys.path:
        sys.path.append(ON_PATH)
    importlib.invalidate_caches()
    importlib.import_module("horovod")


def register(package: ModuleType) -> None:
    """Fill in the package ``horovod``. Called by the one in ``on_path`` when it is first imported.

    Raises:
        ConfigurationError: Horovod itself is installed here; ``PYTHONPATH`` may come before it.
    """
    _check_installed()
    vars(package)["__version__"] = INTERFACE_VERSION
    vars(package)["run"] = run
    runner = ModuleType("horovod.runner", "horovod.run, by its other name.")
    runner.__path__ = []
    vars(runner)["run"] = run
    sys.modules["horovod.runner"] = vars(package)["runner"] = runner
    between = ModuleType("horovod.common", "Horovod's exceptions, process sets and elastic states.")
    between.__path__ = []
    sys.modules["horovod.common"] = vars(package)["common"] = between
    for name, target in _MODULES.items():
        module = importlib.import_module(target)
        sys.modules[name] = module
        # `import a.b.c` reads c from b: what is taken from sys.modules is not set there by Python.
        parent, _, last = name.rpartition(".")
        vars(sys.modules[parent]).setdefault(last, module)
    sys.meta_path.insert(0, _Refusing())


class _Refusing:
    """Finds no module: says what is there in place of what this alias lacks."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Raise for what is below ``horovod``, since what is offered has been imported; leave the rest to others."""
        del path, target
        if not name.startswith("horovod."):
            return None
        instead = next((text for known, text in _INSTEAD.items() if f"{name}.".startswith(f"{known}.")), None)
        offered = ", ".join(_MODULES)
        message = f"rankwise stands in for horovod.torch, and has no {name}: {instead or f'it has {offered}'}"
        raise ModuleNotFoundError(message, name=name)


def _is_ours(spec: ModuleSpec | None) -> bool:
    return spec is not None and spec.origin is not None and spec.origin.startswith(ON_PATH)


def _check_installed() -> None:
    found = importlib.machinery.PathFinder.find_spec("horovod", [one for one in sys.path if one != ON_PATH])
    # A folder of that name without an __init__.py is nobody's Horovod: what this provides goes before it.
    if found is not None and found.origin is not None:
        raise _there_are_two(f"it is installed: {found.origin}")


def _there_are_two(evidence: str) -> ConfigurationError:
    return ConfigurationError(
        "The name `horovod` was to mean rankwise.compat.horovod, and Horovod itself is there.",
        evidence=evidence,
        do="write `import rankwise.compat.horovod as hvd` in the script, or run it where Horovod is not installed",
    )
