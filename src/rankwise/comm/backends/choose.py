# SPDX-License-Identifier: Apache-2.0
"""Which exchange a world uses, and why: the same decision on every rank."""

from __future__ import annotations

import json
import os
import platform
from typing import TYPE_CHECKING

from rankwise.comm.backends.engine import Engine, has_futex
from rankwise.comm.backends.gather_text import gather_texts
from rankwise.comm.backends.shared_memory import HostMap, open_shared_memory
from rankwise.comm.backends.through_host import ThroughHost
from rankwise.errors import ConfigurationError, fold_values
from rankwise.health.process_probe import Peers
from rankwise.world.device.choice import goes_through_host
from rankwise.world.device.kinds import type_of
from rankwise.world.processes import machine_name

if TYPE_CHECKING:
    from rankwise.comm.backends.protocol import Exchange
    from rankwise.comm.backends.torch_group import TorchGroup
    from rankwise.world.facts import World

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
