# SPDX-License-Identifier: Apache-2.0
"""What every part of ``run.py`` starts from: which device it runs on, and ranks that share it.

A part is a list of checks. A check is a function of the setting that returns its figures, and raises if it fails.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from rankwise.comm import join as joining
from rankwise.comm.backends.torch_group import TorchGroup
from rankwise.comm.session import set_current
from rankwise.store import opening
from rankwise.testing import run_ranks
from rankwise.world.device import accelerator
from rankwise.world.device.choice import choose_backend

if TYPE_CHECKING:
    from collections.abc import Callable

    import rankwise as rw

SHARED_GPU_NCCL = (2, 30)
"""The first NCCL that lets several ranks share a GPU, if NCCL_MULTI_RANK_GPU_ENABLE=1."""
GROUP_SECONDS = 60.0


class NotPossible(Exception):
    """A check that this machine, or this torch, cannot run; the text says why."""


@dataclass(frozen=True, slots=True)
class Check:
    """A check: its name, and a function that returns figures or raises."""

    name: str
    run: Callable[[Setting], str]


@dataclass(frozen=True, slots=True)
class Setting:
    """The kind of device: ``cuda``, or ``cpu`` and ``standin`` to try the script without a GPU."""

    kind: str

    @property
    def is_cuda(self) -> bool:
        """Whether it is a GPU, and sizes are those to measure."""
        return self.kind == "cuda"

    @property
    def device(self) -> str:
        """The device that ranks share."""
        return "cpu" if self.kind == "cpu" else f"{self.kind}:0"

    def needs_cuda(self) -> None:
        """Raise unless it is a GPU."""
        if not self.is_cuda:
            raise NotPossible("needs CUDA")

    def num_devices(self) -> int:
        """Return how many ranks can have a device of their own."""
        return 4 if self.kind == "cpu" else torch.accelerator.device_count()

    def shared(self, fn: Callable[..., Any], num_ranks: int, *args: object, seconds: float = 60.0) -> list[Any]:
        """Return the results of ranks that share the one device, through Gloo; of one rank, without a group."""
        backend = "gloo" if num_ranks > 1 else None
        found = run_ranks(fn, num_ranks, *args, device=self.device, backend=backend, timeout_seconds=seconds)
        return [result.get() for result in found]

    def own_backend(self, num_ranks: int) -> dict[str, Any]:
        """Return the options of ``run_ranks`` for ranks that exchange through the device's own backend.

        Raises:
            NotPossible: there are too few devices, and its backend takes one rank per device.
        """
        if self.num_devices() >= num_ranks:
            return {"device": "cpu" if self.kind == "cpu" else None}
        version = accelerator.nccl_version() or ()
        if self.is_cuda and version >= SHARED_GPU_NCCL:
            return {"device": self.device}
        raise NotPossible(f"not possible: NCCL {'.'.join(map(str, version))}; ranks share a GPU from 2.30 on")

    def any_backend(self, num_ranks: int) -> dict[str, Any]:
        """Return the options for the device's own backend if possible, else for Gloo on the one device."""
        try:
            return self.own_backend(num_ranks)
        except NotPossible:
            return {"device": self.device, "backend": "gloo"}

    def alone(self, fn: Callable[..., Any], *args: object, seconds: float = 60.0) -> Any:
        """Return the result of one rank whose collectives go through a group of its device's backend all the same."""
        return run_ranks(OverGroup(fn), 1, *args, device=self.device, timeout_seconds=seconds)[0].get()

    def on_cpu(self, fn: Callable[..., Any], *args: object) -> Any:
        """Return the result of one rank on the CPU: what all others are compared with."""
        return run_ranks(fn, 1, *args)[0].get()


@dataclass(frozen=True, slots=True)
class OverGroup:
    """Calls a function on a rank of a world of one that has a process group, as ranks of larger worlds have.

    ``join()`` opens none for one rank, so that nothing of NCCL would run on a machine with one GPU.
    """

    fn: Callable[..., Any]

    def __call__(self, world: rw.World, *args: object) -> Any:
        store = opening.open_file(tempfile.mkstemp(prefix="rankwise-store-")[1], 1)
        world = joining.JoinedWorld(**asdict(world) | {"backend": choose_backend(None, world.device)})
        session = joining._session(world, store, GROUP_SECONDS, serves_store=False, object_key=b"")
        set_current(session)
        assert isinstance(session.exchange, TorchGroup)
        # It has no neighbour to hold a connection to.
        with patch.multiple(joining, current_endpoint=lambda _: None, watch_ring=lambda _: lambda: None):
            joining._connect(session, store, session.exchange, "auto")
        return self.fn(world, *args)


def synchronize() -> None:
    """Wait for the device, where there is one."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def compared(difference: float, limit: float) -> str:
    """Return a difference as a figure; raise if it is larger than ``limit``."""
    if not difference <= limit:
        raise AssertionError(f"differs by {difference:.1e}, more than {limit:.0e}")
    return f"{difference:.0e}"
