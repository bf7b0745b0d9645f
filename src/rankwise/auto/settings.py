# SPDX-License-Identifier: Apache-2.0
"""The settings of torch, of this process and this thread, that change what a call of a module computes."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import backends
from torch.backends import cuda, cudnn, mkldnn
from torch.utils import deterministic

from rankwise.world.device.accelerator import found_kind

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

    Settings = tuple[Any, ...]
    """Can be compared and pickled."""
    Setting = tuple[Callable[[], object], Callable[[Any], object]]
    """Functions that return it, and that set it."""


def _attributes(owner: object, *names: str) -> Iterable[Setting]:
    for name in names:
        yield lambda name=name: getattr(owner, name, None), lambda value, name=name: setattr(owner, name, value)


def _matmul_precision() -> str | None:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # the script has set the newer fp32_precision
        return None


def _default_device() -> torch.device:
    try:
        return torch.get_default_device()
    except AttributeError:  # torch 2.9, once a default has been removed
        return torch.device("cpu")


def _set_default_device(device: torch.device) -> None:
    torch.set_default_device(None if device.type == "cpu" else device)  # a mode, which costs time in each function


_OF_PROCESS: tuple[Setting, ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (_default_device, _set_default_device),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    *_attributes(deterministic, "fill_uninitialized_memory"),
    (backends.mha.get_fastpath_enabled, backends.mha.set_fastpath_enabled),
    *_attributes(cudnn, "enabled", "benchmark", "deterministic"),
    *_attributes(mkldnn, "enabled", "deterministic"),
    (_matmul_precision, torch.set_float32_matmul_precision),
    *(
        setting
        for owner in (cuda.matmul, cudnn.conv, cudnn.rnn, mkldnn.matmul, mkldnn.conv, mkldnn.rnn)  # type: ignore[attr-defined]
        for setting in _attributes(owner, "fp32_precision")
    ),
    *_attributes(cuda.matmul, "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction"),
    (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    (cuda.math_sdp_enabled, cuda.enable_math_sdp),
)


@cache
def _autocast_kinds() -> tuple[str, ...]:
    found = found_kind()
    return ("cpu",) if found is None else ("cpu", found.name)


def settings() -> Settings:
    """Return the settings as they are on this thread."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_cache_enabled(),
        *((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _autocast_kinds()),
        tuple(read() for read, _ in _OF_PROCESS),
    )


class AppliedSettings:
    """The settings that a server has taken over from rank zero."""

    def __init__(self) -> None:
        self._of_process: object = None

    @contextmanager
    def applied(self, values: Settings) -> Generator[None]:
        """Compute as where ``settings()`` returned ``values`` inside the block; those of the process stay after it."""
        has_grad, is_inference, has_cache, *autocasts, of_process = values
        if self._of_process != of_process:
            for (read, write), value in zip(_OF_PROCESS, of_process, strict=True):
                if value is not None and read() != value:
                    write(value)
            self._of_process = of_process
        with ExitStack() as stack:
            if is_inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(has_grad))
            for kind, is_enabled, dtype in autocasts:
                if is_enabled:
                    stack.enter_context(torch.autocast(kind, dtype, cache_enabled=has_cache))
            yield
