# SPDX-License-Identifier: Apache-2.0
"""``horovod.common.util``: which extensions were built, as scripts and test suites check, and a few small functions.

Reports how torch itself was built: rankwise has no extension of its own.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, TypeVar

from rankwise.compat.horovod import initialization
from rankwise.errors import ConfigurationError
from rankwise.world.device import accelerator
from rankwise.world.environments.process import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

T = TypeVar("T")

EXTENSIONS = ["torch"]
"""The frameworks with an extension of Horovod that are offered here."""


def check_extension(ext_name: str, ext_env_var: str = "", pkg_path: str = "", *args: str) -> None:
    """Raise unless a framework's extension is offered.

    Args:
        ext_name: ``"horovod.torch"``.
        ext_env_var: not used: nothing is built.
        pkg_path: not used.
        args: not used.

    Raises:
        ImportError: ``ext_name`` is the extension of another framework.
    """
    del ext_env_var, pkg_path, args
    if not extension_available(ext_name.removeprefix("horovod.")):
        message = (
            f"{ext_name} is not offered: rankwise stands in for horovod.torch. Use torch, or rankwise.all_reduce()"
        )
        raise ImportError(message, name=ext_name)


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:  # noqa: FBT001, FBT002 - Horovod's argument
    """Return whether a framework is offered: ``"torch"`` is.

    Args:
        ext_base_name: ``"torch"``, ``"tensorflow"``, ``"mxnet"``.
        verbose: not used.
    """
    del verbose
    return ext_base_name in EXTENSIONS


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:  # noqa: FBT001, FBT002 - Horovod's argument
    """Return whether a framework is offered and finds a GPU of CUDA or ROCm.

    Args:
        ext_base_name: ``"torch"``.
        verbose: not used.
    """
    return extension_available(ext_base_name, verbose) and accelerator.count_of("cuda") > 0


def _with_verbose(built: Callable[[], T]) -> Callable[..., T]:
    """Return a function of ``hvd`` with the unused argument that it has in ``horovod.common.util``."""

    def call(verbose: bool = False) -> T:  # noqa: FBT001, FBT002 - Horovod's argument
        del verbose
        return built()

    call.__name__, call.__doc__ = built.__name__, built.__doc__
    return call


mpi_built = _with_verbose(initialization.mpi_built)
gloo_built = _with_verbose(initialization.gloo_built)
nccl_built = _with_verbose(initialization.nccl_built)
ddl_built = _with_verbose(initialization.ddl_built)
ccl_built = _with_verbose(initialization.ccl_built)


def env(**kwargs: str | None) -> AbstractContextManager[None]:
    """Return a context manager that sets environment variables, and restores their previous values at the end.

    Args:
        kwargs: the variables; those that are ``None`` are not changed.
    """
    return replaced({name: value for name, value in kwargs.items() if value is not None})


def split_list(l: Sequence[T], n: int) -> list[Sequence[T]]:  # noqa: E741 - Horovod's argument
    """Return ``n`` parts of a sequence in order, as equal as possible, the longer ones first.

    Raises:
        ConfigurationError: ``n`` is less than 1.
    """
    if n < 1:
        raise ConfigurationError(f"n must be at least 1, got {n}.", do="pass the number of parts")
    size, longer = divmod(len(l), n)
    starts = [number * size + min(number, longer) for number in range(n + 1)]
    return [l[start:end] for start, end in itertools.pairwise(starts)]


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return whether a number of ranks is 1, 2, 4, 8 and so on."""
    return num_rank > 0 and num_rank.bit_count() == 1


def is_iterable(x: Any) -> bool:
    """Return whether ``iter(x)`` works."""
    try:
        iter(x)
    except TypeError:
        return False
    return True
