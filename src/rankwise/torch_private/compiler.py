# SPDX-License-Identifier: Apache-2.0
"""Functions that torch.compile skips, at no cost if nothing is compiled."""

from __future__ import annotations

import importlib
import sys
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch.autograd import forward_ad
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
R = TypeVar("R")

_compiler: Any = torch._C._dynamo.eval_frame  # type: ignore[attr-defined] # noqa: SLF001
_SKIP_ALL = _compiler._FrameExecStrategy(_compiler._FrameAction.SKIP, _compiler._FrameAction.SKIP)  # noqa: SLF001

OWN_RANDOMNESS_OFF = "torch._inductor.config.fallback_random"
"""The setting that makes compiled code use torch's random operations, as named in messages."""


def uncompiled(fn: Callable[P, R]) -> Callable[P, R]:
    """Return ``fn`` so that the compiler skips it: it runs uncompiled, between two compiled graphs.

    torch.compiler.disable imports the compiler (1.5 s) at once, and the private form does at its first call. Here it
    is called only while a graph is compiled.
    """
    disabled = between_graphs(fn)

    @wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return (disabled if torch.compiler.is_compiling() else fn)(*args, **kwargs)

    return skipped(call)


def between_graphs(fn: Callable[P, R]) -> Callable[P, R]:
    """Return ``fn`` so that a graph which is compiled ends where it is called. Imports the compiler when called."""
    return torch._disable_dynamo(fn)  # type: ignore[no-any-return] # noqa: SLF001


def skipped(fn: Callable[P, R]) -> Callable[P, R]:
    """Have the compiler skip a function that torch calls between compiled graphs, and all that it calls, at no cost."""
    _compiler.set_code_exec_strategy(fn.__code__, _SKIP_ALL)  # type: ignore[attr-defined]
    return fn


def import_compiler() -> None:
    """Import the compiler, which torch's optimizers import at their first use."""
    importlib.import_module("torch._dynamo")


def compiles_code() -> bool:
    """Return whether torch.compile has been called in this process."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    return compiler is not None and any(one is not None for one in compiler.cached_backends.values())


def module_within(module: torch.nn.Module) -> torch.nn.Module | None:
    """Return the module that ``torch.compile(module)`` has wrapped, or ``None`` if there is none."""
    return dict(module.named_children()).get("_orig_mod")


def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether a module, or a part of it, is compiled when it is called."""
    if "torch._dynamo" not in sys.modules:
        return False
    return any(module_within(one) is not None or one._compiled_call_impl is not None for one in module.modules())  # noqa: SLF001


class GraphSplit:
    """Splits graphs that are compiled in a model's forward at its buckets: each part returns its gradients by itself.

    The compiler reads the size of a bucket from the DistributedDataParallel whose forward is running, for which this
    stands in. The user's setting ``optimize_ddp`` of the compiler turns it off.
    """

    def __init__(self, bucket_bytes: int) -> None:
        self.bucket_bytes_cap = bucket_bytes

    def begin(self, *_: object) -> None:
        """Split what is compiled from now on. Called before forward."""
        if torch.is_grad_enabled():
            DistributedDataParallel._active_ddp_module = self  # type: ignore[assignment] # noqa: SLF001

    def end(self, *_: object) -> None:
        """Split no more. Called after forward."""
        DistributedDataParallel._active_ddp_module = None  # noqa: SLF001


def is_transforming() -> bool:
    """Return whether a call is traced, compiled, differentiated in forward mode, or inside ``torch.func``."""
    return (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or forward_ad._current_level >= 0  # noqa: SLF001
        or torch._C._functorch.peek_interpreter_stack() is not None  # type: ignore[attr-defined] # noqa: SLF001
    )
