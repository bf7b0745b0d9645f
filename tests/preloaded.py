# SPDX-License-Identifier: Apache-2.0
"""What processes that tests fork find in memory, rather than import each for itself: importing this imports it all.

Torch's compiler, and what imports it, are left out where torch has triton, whose bindings complain at the end of a
process of what is frozen.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import pkgutil

from rankwise.launch.fork_server import fork_server
from rankwise.torch_private.compiler import import_compiler

MODULES = (
    "rankwise.cli",
    "rankwise.testing",
    "rankwise.torch_private.fake",
    "rankwise.compat.horovod",
    "rankwise.compat.megengine",
    "numpy",
    # Sockets, torch's profiler and strategies import these when they are first used.
    "encodings.idna",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
)
WHERE_THEY_ARE = (
    # Of some versions of torch.
    "torch.profiler._cupti_monitor",
    # Most examples.
    "sklearn.datasets",
)
PACKAGES = ("rankwise.launch", "rankwise.parallel", "rankwise.data", "rankwise.checkpoint")

fork_server._preload()
for _name in MODULES:
    importlib.import_module(_name)
for _name in PACKAGES:
    for _found in pkgutil.walk_packages(importlib.import_module(_name).__path__, f"{_name}."):
        importlib.import_module(_found.name)
if importlib.util.find_spec("triton") is None:
    import_compiler()
    importlib.import_module("torch._inductor.lowering")
    importlib.import_module("torch.distributed.pipelining")
for _name in WHERE_THEY_ARE:
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module(_name)
# Otherwise a fork copies all of it as soon as it collects garbage, or looks at every object.
gc.freeze()
