# SPDX-License-Identifier: Apache-2.0
"""What processes that tests fork find in memory, rather than import each for itself: importing this imports it all.

Torch's compiler, and what imports it, are left out where torch has triton, whose bindings complain at the end of a
process of what is frozen.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import importlib.util
import pkgutil
from pathlib import Path

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
NEEDS_TRITON = {"rankwise.replicate.random_numbers.triton_philox"}
HUGE_PAGE_BYTES = 2 << 20
MADV_COLLAPSE = 25
"""Source: Linux's include/uapi/asm-generic/mman-common.h, from 6.1 on; others refuse it."""
PACKAGES = (
    "rankwise.launch",
    "rankwise.data",
    "rankwise.checkpoint",
    *(f"rankwise.{name}" for name in ("replicate", "shard", "tensor_parallel", "pipeline", "compress")),
    *(f"rankwise.{name}" for name in ("local_sgd", "parameter_server", "place")),
)


def _use_huge_pages() -> None:
    """Move this process's memory into huge pages: 80,000 pages fewer are a third of the time of a fork and its end."""
    madvise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        place, rights, _, _, inode, *name = line.split()
        if rights == "rw-p" and inode == "0" and name in ([], ["[heap]"]):
            start, end = (int(address, 16) for address in place.split("-"))
            start += -start % HUGE_PAGE_BYTES
            size_bytes = (end - start) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
            if size_bytes > 0:
                madvise(ctypes.c_void_p(start), ctypes.c_size_t(size_bytes), MADV_COLLAPSE)


fork_server._bind_public_names()
for _name in MODULES:
    importlib.import_module(_name)
for _name in PACKAGES:
    for _found in pkgutil.walk_packages(importlib.import_module(_name).__path__, f"{_name}."):
        if _found.name not in NEEDS_TRITON:
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
_use_huge_pages()
