# SPDX-License-Identifier: Apache-2.0
"""What a call of a module depends on besides its arguments: settings of torch, and states of random generators."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import backends
from torch.backends import cuda, cudnn, mkldnn
from torch.utils import deterministic

from rankwise.data.sources import generator_state, set_generator_state
from rankwise.world.device.accelerator import found_kind, random_state, set_random_state

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

    from rankwise.data.sources import GeneratorState

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


@dataclass(frozen=True, slots=True, eq=False)
class GeneratorStates:
    """The states at one time. ``==`` would compare tensors."""

    of_cpu: GeneratorState
    of_device: torch.Tensor | None
    """Of torch's generator of an accelerator."""

    @classmethod
    def now(cls, device: torch.device) -> Self:
        """Return the states of the CPU's generators, and of a device's."""
        return cls(generator_state(), None if device.type == "cpu" else random_state(device))

    def restore(self, device: torch.device) -> None:
        """Continue from these states."""
        set_generator_state(self.of_cpu)
        if self.of_device is not None:
            set_random_state(device, self.of_device)

    def are(self, other: GeneratorStates) -> bool:
        """Return whether both are the same."""
        pythons, numpys, torchs = self.of_cpu
        other_pythons, other_numpys, other_torchs = other.of_cpu
        of_device = torchs[:0] if self.of_device is None else self.of_device
        other_of_device = torchs[:0] if other.of_device is None else other.of_device
        return (
            pythons == other_pythons
            and all(np.array_equal(one, two) for one, two in zip(numpys, other_numpys, strict=True))
            and torch.equal(torchs, other_torchs)
            and torch.equal(of_device, other_of_device)
        )
