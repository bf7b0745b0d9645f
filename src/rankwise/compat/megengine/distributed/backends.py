# SPDX-License-Identifier: Apache-2.0
"""MegEngine's names of backends, and what each means to :func:`rankwise.join`. Imported by this room's other files."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rankwise.comm.session import current
from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Generator

_BACKENDS: dict[str, dict[str, Any]] = {
    "auto": {},
    "gloo": {"backend": "gloo"},
    "nccl": {"backend": "nccl"},
    "rccl": {"backend": "nccl"},
    "shm": {"exchange": "shared_memory"},
}


def arguments_of(backend: str) -> dict[str, Any]:
    """Return what :func:`rankwise.join` is to be given for a backend.

    Raises:
        ConfigurationError: there is no such backend.
    """
    if backend not in _BACKENDS:
        raise ConfigurationError(
            f"Unknown backend {backend!r}.",
            do="use one of " + ", ".join(_BACKENDS) + "; auto selects NCCL on GPUs, shared memory or Gloo elsewhere",
        )
    return _BACKENDS[backend]


@contextmanager
def override_backend(new_backend: str) -> Generator[None]:
    """Check the name of a backend, and change nothing.

    What carries a tensor is chosen when the world is joined, by the device of the tensor and by where the ranks are,
    so that there is no other to change to.

    Raises:
        ConfigurationError: there is no such backend.
        NotJoined: no world has been joined.
    """
    current()
    arguments_of(new_backend)
    yield
