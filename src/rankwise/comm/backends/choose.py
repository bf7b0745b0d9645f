# SPDX-License-Identifier: Apache-2.0
"""Which exchange a world uses, and why: the same decision on every rank.

Tensors of a device that no backend supports are copied to the CPU, exchanged there, and copied back: the other ranks
see tensors of the CPU only, so each rank decides that for itself.
"""

from __future__ import annotations

import json
import os
import platform
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch

from rankwise.comm.backends.engine import Engine, has_futex
from rankwise.comm.backends.protocol import gather_texts
from rankwise.comm.backends.shared_memory import HostMap, open_shared_memory
from rankwise.errors import ConfigurationError, fold_values
from rankwise.health.process_probe import Peers
from rankwise.world.device.choice import goes_through_host
from rankwise.world.device.kinds import type_of
from rankwise.world.processes import machine_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankwise.comm.backends.protocol import Amount, BucketChannel, ChannelSize, Exchange
    from rankwise.comm.backends.torch_group import TorchGroup
    from rankwise.world.facts import World

CPU = torch.device("cpu")
EXCHANGES = ("auto", "shared_memory", "gloo")


def check_exchange(wanted: str) -> None:
    """Raise :class:`ConfigurationError` unless an exchange of this name exists."""
    if wanted not in EXCHANGES:
        raise ConfigurationError(f"exchange={wanted!r} is invalid.", do="use one of " + ", ".join(EXCHANGES))


def open_exchange(wanted: str, group: TorchGroup, world: World, *, checks: bool = False) -> tuple[Exchange, str]:
    """Open the exchange of a world; return it with a short description, empty if there was nothing to choose.

    Called by: every rank. ``wanted`` is one of ``EXCHANGES``. With ``checks``, every collective is compared on all
    ranks before it begins.

    Raises:
        ConfigurationError: ranks want different ones, or shared memory is wanted but not available; or ``checks``
            differs between ranks.
    """
    exchange, words = _open(wanted, group, world, checks=checks)
    if not goes_through_host(world.device, world.backend):
        return exchange, words
    through = f"tensors on {type_of(world.device)} are copied through host memory"
    return ThroughHost(exchange), f"{words}; {through}" if words else through


def _open(wanted: str, group: TorchGroup, world: World, *, checks: bool) -> tuple[Exchange, str]:
    kind = "cpu" if goes_through_host(world.device, world.backend) else type_of(world.device)
    own = json.dumps([wanted, kind, home_of(world), os.getpid(), checks])
    texts = gather_texts(group, own, what="choosing an exchange")
    facts = [json.loads(text) for text in texts]
    if len({fact[0] for fact in facts}) > 1:
        raise ConfigurationError(
            "exchange= differs between ranks.",
            where=f"reported on {world}",
            evidence=fold_values({rank: f"exchange={fact[0]!r}" for rank, fact in enumerate(facts)}),
            do="pass the same exchange= to rankwise.join() on every rank",
        )
    if len({fact[4] for fact in facts}) > 1:
        raise ConfigurationError(
            "RANKWISE_CHECK is set on some ranks only.",
            where=f"reported on {world}",
            evidence=fold_values(
                {rank: f"RANKWISE_CHECK is {'' if fact[4] else 'not '}set" for rank, fact in enumerate(facts)}
            ),
            do="set RANKWISE_CHECK=1 for every rank, or for none",
        )
    if checks:
        group.compare_everything()
    if wanted == "gloo":
        return group, ""
    if any(fact[1] != "cpu" for fact in facts):
        return _without(group, world, wanted, "a rank's device has a backend of its own", is_news=False)
    homes = [fact[2] for fact in facts]
    reason = _why_not(homes)
    if reason:
        return _without(group, world, wanted, reason)
    host_map = HostMap([[r for r, home in enumerate(homes) if home == one] for one in dict.fromkeys(homes)], world.rank)
    engine = Engine(group.detector, Peers(host_map.ranks, [facts[rank][3] for rank in host_map.ranks]))
    try:
        exchange = open_shared_memory(group, host_map, group, engine)
    except BaseException as error:
        engine.peers.close()
        if not isinstance(error, ConfigurationError):
            raise
        return _without(group, world, wanted, error.evidence or "")
    return exchange, f"shared memory between {_counts(host_map)}"


def home_of(world: World) -> str:
    """Return a key that processes share if they can share memory; after ``!``, why this one can share with none."""
    if not has_futex():
        return f"!{platform.machine()} on {platform.system()} does not order stores as shared memory requires"
    return f"{world.hostname} {machine_name()}"


def _why_not(homes: list[str]) -> str:
    unfit = next((home for home in homes if home.startswith("!")), None)
    if unfit is not None:
        return unfit[1:]
    if len(set(homes)) < len(homes):
        return ""
    if len({home.partition(" ")[0] for home in homes}) < len(homes):
        return "ranks of one host are in different containers"
    return "no two ranks are on one host"


def _counts(host_map: HostMap) -> str:
    if len(host_map.hosts) == 1:
        return f"{len(host_map.ranks)} ranks"
    counts = ", ".join(map(str, sorted({len(ranks) for ranks in host_map.hosts})))
    return f"{counts} ranks on each of {len(host_map.hosts)} hosts, Gloo between hosts"


def _without(
    group: TorchGroup, world: World, wanted: str, reason: str, *, is_news: bool = True
) -> tuple[Exchange, str]:
    if wanted == "shared_memory":
        raise ConfigurationError(
            "The ranks cannot use shared memory.",
            where=f"reported on {world}",
            evidence=reason,
            do='use exchange="auto", which picks what is available',
        )
    return group, f"Gloo; not shared memory: {reason}" if is_news else ""


# -- through the memory of the host --------------------------------------------------------------------


class ThroughHost:
    """An exchange for tensors of any device. See :class:`rankwise.comm.backends.protocol.Exchange`.

    ``inner`` sends CPU tensors, which are passed on as they are.
    """

    def __init__(self, inner: Exchange) -> None:
        self.inner = inner
        self.rank = inner.rank
        self.world_size = inner.world_size
        self.detector = inner.detector
        self.agree, self.gather_notes, self.barrier = inner.agree, inner.gather_notes, inner.barrier
        self.close = inner.close

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum", *, what: str) -> torch.Tensor:
        """Return the reduction over all ranks, on the tensor's own device."""
        return self.inner.all_reduce(tensor.to(CPU), op, what=what).to(tensor.device)

    def all_gather(self, tensor: torch.Tensor, *, what: str) -> torch.Tensor:
        """Return [world_size, *tensor.shape], on the tensor's own device."""
        return self.inner.all_gather(tensor.to(CPU), what=what).to(tensor.device)

    def broadcast(self, tensor: torch.Tensor, source: int, *, what: str) -> torch.Tensor:
        """Return the tensor of rank ``source``, on the device of this rank's."""
        return self.inner.broadcast(tensor.to(CPU), source, what=what).to(tensor.device)

    def all_to_all(self, tensor: torch.Tensor, sizes: Sequence[Sequence[int]], *, what: str) -> torch.Tensor:
        """Return what every rank sends to this one, on the tensor's own device."""
        return self.inner.all_to_all(tensor.to(CPU), sizes, what=what).to(tensor.device)

    def dup(self) -> ThroughHost:
        """Return another exchange of the same ranks."""
        return ThroughHost(self.inner.dup())

    def split(self, groups: Sequence[Sequence[int]]) -> ThroughHost:
        """Return an exchange of some of the ranks."""
        return ThroughHost(self.inner.split(groups))

    def channel_bytes(self, device: torch.device) -> int:
        """Return the best size of a CPU channel in bytes."""
        del device
        return self.inner.channel_bytes(CPU)

    def channels(self, sizes: Sequence[ChannelSize], what: str = "gradients") -> list[BucketChannel]:
        """Return a channel for each size, with its body on the device."""
        channels = self.inner.channels([replace(size, device=CPU) for size in sizes], what)
        return [
            channel if size.device == CPU else MirrorChannel(channel, size)
            for channel, size in zip(channels, sizes, strict=True)
        ]


class MirrorChannel:
    """A channel whose body has another dtype, or is on another device, than that of ``inner``, which sends it."""

    def __init__(self, inner: BucketChannel, size: ChannelSize) -> None:
        self._inner = inner
        self.body = self.result = torch.zeros(size.num_elements, dtype=size.dtype, device=size.device)
        self.can_claim = inner.can_claim
        self.claim = inner.claim
        self.factor = inner.factor
        self.total = inner.total
        self.is_flag_set = inner.is_flag_set

    @torch.no_grad()
    def start(self, share: Amount, weight: Amount, absent: Sequence[int]) -> None:
        """Copy the body and send it."""
        if isinstance(share, torch.Tensor) or share != 0.0:
            self._inner.body.copy_(self.body)
        self._inner.start(cast("float", share), cast("float", weight), absent)

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the mean, and copy it back."""
        self._inner.finish()
        self.result.copy_(self._inner.result)
