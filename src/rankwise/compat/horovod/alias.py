# SPDX-License-Identifier: Apache-2.0
"""``import horovod.torch`` without Horovod: an alias that a program requests by :func:`provide`."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

from rankwise.compat import import_alias
from rankwise.compat.horovod.launching import run
from rankwise.compat.import_alias import ImportAlias

INTERFACE_VERSION = "0.28.1"
"""The version of Horovod whose API is offered; the value of ``horovod.__version__``."""
ON_PATH = str(Path(__file__).parent / "on_path")
"""The folder that a process imports ``horovod`` from; the last on ``sys.path``, if possible."""
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
    "horovod.torch.elastic.state": f"{_PACKAGE}.elastic.state",
    "horovod.common.elastic": f"{_PACKAGE}.elastic",
    "horovod.common.exceptions": f"{_PACKAGE}.exceptions",
    "horovod.common.process_sets": _PACKAGE,
    "horovod.common.util": f"{_PACKAGE}.extensions",
}
"""The modules that a script may import, and those that it gets."""

_OTHER_ARRAYS = "rankwise.all_reduce() and the other collectives take arrays of other frameworks, gradients too"
_INSTEAD = {
    "horovod.tensorflow": _OTHER_ARRAYS,
    "horovod.keras": _OTHER_ARRAYS,
    "horovod.mxnet": _OTHER_ARRAYS,
    "horovod.spark": "start the job with `rankwise run --hosts a,b`, or from Python with rankwise.launch()",
    "horovod.ray": "start the job with `rankwise run --hosts a,b`, or from Python with rankwise.launch()",
    "horovod.run": "run `rankwise horovodrun`, or start ranks from Python with horovod.run()",
    "horovod.runner": "run `rankwise horovodrun`, or start ranks from Python with horovod.run()",
    "horovod.data": "read ahead with torch.utils.data.DataLoader(num_workers=...)",
}
"""Modules that are not offered, and what to use instead."""
_ALIAS = ImportAlias(
    name="horovod",
    library="Horovod",
    package=_PACKAGE,
    usual_import="import rankwise.compat.horovod as hvd",
    on_path=ON_PATH,
    modules=_MODULES,
    instead=_INSTEAD,
)


def provide() -> None:
    """Make ``import horovod.torch`` give :mod:`rankwise.compat.horovod`, from now on in this process.

    Processes that multiprocessing starts have it too. Calling it again does nothing.

    Raises:
        ConfigurationError: Horovod itself is installed here, or has been imported already.
    """
    import_alias.provide(_ALIAS)


def register(package: ModuleType) -> None:
    """Fill in the package ``horovod``. Called by the one in ``on_path`` when it is first imported.

    Raises:
        ConfigurationError: Horovod itself is installed here; ``PYTHONPATH`` may come before it.
    """
    import_alias.check_not_installed(_ALIAS)
    vars(package).update(__version__=INTERFACE_VERSION, run=run)
    for name, doc, content in (
        ("runner", "horovod.run under its other name.", {"run": run}),
        ("common", "Horovod's exceptions, process sets and elastic states.", {}),
    ):
        between = ModuleType(f"horovod.{name}", doc)
        between.__path__ = []
        vars(between).update(content)
        sys.modules[f"horovod.{name}"] = vars(package)[name] = between
    import_alias.register(_ALIAS)
