# SPDX-License-Identifier: Apache-2.0
"""A device for tests: ``standin:0`` to ``standin:3``, in the CPU's memory, computing on the CPU.

torch takes it for an accelerator (its PrivateUse1 mechanism), so rankwise's code for accelerators runs without one. No
backend of torch carries its tensors, unless ``load(strict=True)`` or ``STANDIN_BACKEND=strict`` asks for the one below.
A process has it after :func:`load`, or after ``import torch`` where the folder above is on ``PYTHONPATH``: torch loads
it by the entry point ``torch.backends``, as it loads torch_npu.

Emulated in ``standin.cpp``, on the device's own memory:

- memory: ``empty.memory_format``, ``empty_strided``, ``resize_``, ``set_.source_Tensor``, ``set_.source_Storage``,
  ``set_.source_Storage_storage_offset``, ``record_stream``; 1 GiB per device, counted; pinned memory of the host;
- copies: ``_copy_from``, ``_copy_from_and_resize``, ``_local_scalar_dense``;
- views: ``as_strided``, ``view``, ``_reshape_alias``, ``view_as_real``, ``view_as_complex``, ``unfold``;
- ``mse_loss``, ``native_batch_norm``;
- autocast: ``linear``, ``matmul``, ``mm``, ``addmm`` in the lower precision, ``mse_loss`` in float32;
- streams and events (numbers; times; each call is finished when it returns), a generator of random numbers per device;
- ``torch.standin.host_syncs()``: how often the CPU has waited for a device, where it would have to on CUDA: values read
  (``item``), copies between CPU and device unless they are ``non_blocking`` and pinned, ``synchronize``, operators
  whose result's size depends on values (``nonzero``, ``unique``, masks as indices).
  ``set_sync_debug_mode("warn" | "error")`` shows where, as that of ``torch.cuda`` does;
- ``torch.standin.capturing()``: inside it, where the CPU would wait or asks about events and streams, an error is
  raised, as while CUDA captures a graph. What is called runs at once.

Every other operator is copied to the CPU, computed there, and copied back.

The backend ``strict`` (``strict.cpp``) is torch's choice for the device where it is loaded. Gloo moves the bytes in
threads of each communicator; what the caller sees is what NCCL's callers see, where that hurts:

- outputs are NaN (integers: the lowest number) until the current stream was ordered after the collective by
  ``wait()``, by
  its future, or by an event. This returns at once; the next operator on that stream blocks until the result is there.
- ``wait(timeout)`` blocks the CPU, counts from when the collective was queued, and is terminal: the communicator is
  aborted. A collective that is not complete at the group's own timeout ends the process.
- a dead peer, or one that calls something else, is not noticed: the collective stays pending.
- ``abort()`` fails what is pending, lets blocked streams go on (results remain NaN), and makes later collectives raise.
- tensors of the CPU or of another device than the communicator's first, and non-contiguous ones, are refused.
- sends and receives block one another per pair of ranks unless batched; tags are ignored.
- the process ends, with a line on stderr, where two ranks issue collectives in different orders, over all communicators
  that have both ranks.

Not emulated: reading an input before the collective has read it (inputs are copied when it is issued), memory that is
reused while a stream needs it (``record_stream``), replays of CUDA graphs. An operator on a blocked stream blocks the
CPU, as does issuing a collective there. Stricter than NCCL: each result needs a ``wait()`` of its own, and
``is_completed()`` orders nothing. ``STANDIN_VERBOSE`` shows what Gloo says about peers that are gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime as dt
import functools
import hashlib
import os
import subprocess
import sys
import sysconfig
import types
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

NUM_DEVICES = 4
FOLDER = Path(__file__).parent
BUILD = FOLDER / "build"
SYNC_DEBUG_MODES = ("default", "warn", "error")


def built(part: str = "standin") -> Path:
    """Return a library for this torch, compiled where it is not there yet (about half a minute)."""
    import torch

    source = FOLDER / f"{part}.cpp"
    parts = [source.read_bytes(), FOLDER.joinpath("standin.h").read_bytes(), torch.__version__.encode()]
    library = BUILD / f"{part}-{torch.__version__}-{hashlib.sha256(b''.join(parts)).hexdigest()[:16]}.so"
    if not library.exists():
        BUILD.mkdir(exist_ok=True)
        root = Path(torch.__file__).parent
        # Not named by the process: lanes number their processes alike.
        unfinished = BUILD / f"{part}-{uuid.uuid4().hex}"
        command = ["g++", "-std=c++20", "-O0", "-w", "-fPIC", "-shared", str(source), "-o", str(unfinished)]
        command += [f"-I{root}/include", f"-I{root}/include/torch/csrc/api/include"]
        command += [f"-I{sysconfig.get_path('include')}"]
        command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", f"-L{root}/lib"]
        subprocess.run([*command, "-lc10", "-ltorch_cpu", "-ltorch_python"], check=True)
        unfinished.rename(library)
    return library


def load(*, strict: bool = False) -> None:
    """Give this process the devices, and the backend ``strict`` where it or the environment asks for it, once."""
    import torch

    is_strict = strict or os.environ.get("STANDIN_BACKEND") == "strict"
    if "standin" in vars(torch):
        if is_strict:
            _register_strict()
        return
    library = ctypes.CDLL(str(built()), mode=ctypes.RTLD_GLOBAL)
    library.standin_state_bytes.restype = ctypes.c_longlong
    library.standin_host_syncs.restype = ctypes.c_longlong
    library.standin_is_capturing.restype = ctypes.c_bool
    torch.utils.rename_privateuse1_backend("standin")
    torch._register_device_module("standin", _module(library))
    torch.utils.generate_methods_for_privateuse1_backend()
    if is_strict:
        _register_strict()


@functools.cache
def _register_strict() -> None:
    """Register the backend, which torch then takes for the device: ``cpu:gloo,standin:strict``."""
    import torch.distributed as dist

    create = ctypes.PyDLL(str(built("strict")), mode=ctypes.RTLD_GLOBAL).standin_strict_backend
    create.restype = ctypes.py_object
    create.argtypes = [ctypes.py_object, ctypes.py_object, ctypes.py_object, ctypes.c_double]

    def new(options: Any, _: object) -> dist.Backend:
        rank, size, timeout = options.group_rank, options.group_size, options.timeout
        inner = dist.ProcessGroupGloo(options.store, rank, size, timeout=timeout)
        inner._set_default_timeout(dt.timedelta(days=1))  # NCCL does not notice that a peer is gone.
        ranks = [] if options.group_id == "0" else list(options.global_ranks_in_group)
        return create(inner, options.group_id, ranks, timeout.total_seconds())

    dist.Backend.register_backend("strict", new, extended_api=True, devices=["standin"])
    # Of several backends torch makes the first plugin a group's default, and misses it by its upper case: a group
    # without a default warns when it is closed ("No backend of type 0").
    plugins = dist.Backend._plugins
    plugins.update({"strict": plugins["STRICT"]} | {name: plugins.pop(name) for name in list(plugins)})


def _module(library: ctypes.CDLL) -> types.ModuleType:  # noqa: C901 - one short function for each of torch's
    """Return what torch knows as ``torch.standin``."""
    import torch

    def device_count() -> int:
        return int(library.standin_device_count())

    def current_device() -> int:
        return int(library.standin_current_device())

    def set_device(device: object) -> None:
        torch.accelerator.set_device_index(device)

    def index_of(device: object) -> int:
        index = device if isinstance(device, int) else torch.device(device).index
        return current_device() if index is None else index

    def manual_seed(seed: int) -> None:
        library.standin_manual_seed(current_device(), ctypes.c_ulonglong(seed))

    def manual_seed_all(seed: int) -> None:
        for index in range(device_count()):
            library.standin_manual_seed(index, ctypes.c_ulonglong(seed))

    def get_rng_state(device: object = "standin") -> torch.Tensor:
        state = torch.empty(library.standin_state_bytes(), dtype=torch.uint8)
        library.standin_get_state(index_of(device), ctypes.c_void_p(state.data_ptr()))
        return state

    def set_rng_state(state: torch.Tensor, device: object = "standin") -> None:
        library.standin_set_state(index_of(device), ctypes.c_void_p(state.data_ptr()))

    @contextlib.contextmanager
    def chosen(device: object) -> Iterator[None]:
        before = current_device()
        set_device(f"standin:{index_of(device)}")
        yield
        set_device(f"standin:{before}")

    @contextlib.contextmanager
    def capturing() -> Iterator[None]:
        library.standin_set_capturing(ctypes.c_bool(True))
        yield
        library.standin_set_capturing(ctypes.c_bool(False))

    module = types.ModuleType("torch.standin")
    vars(module).update(
        device_count=device_count,
        current_device=current_device,
        set_device=set_device,
        is_available=lambda: True,
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        _lazy_init=lambda: None,
        device=chosen,
        manual_seed=manual_seed,
        manual_seed_all=manual_seed_all,
        get_rng_state=get_rng_state,
        set_rng_state=set_rng_state,
        capturing=capturing,
        is_current_stream_capturing=library.standin_is_capturing,
        host_syncs=lambda: int(library.standin_host_syncs()),
        set_sync_debug_mode=lambda mode: library.standin_set_sync_debug_mode(SYNC_DEBUG_MODES.index(mode)),
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        get_device_name=lambda _=None: "stand-in on the CPU",
        synchronize=torch.accelerator.synchronize,
        current_stream=torch.accelerator.current_stream,
        stream=lambda stream: contextlib.nullcontext() if stream is None else stream,
        Stream=torch.Stream,
        Event=torch.Event,
    )
    sys.modules["torch.standin"] = module
    return module
