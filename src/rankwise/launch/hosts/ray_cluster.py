# SPDX-License-Identifier: Apache-2.0
"""A cluster of Ray, and what a job reserves there: how many ranks on each of its nodes, as a placement group.

Starts nothing on it but the actors that it is asked for. Ray is imported when a job starts. Imported by ``on_ray`` and
by those that start jobs there.

Source: https://docs.ray.io/en/latest/ray-core/scheduling/placement-group.html, and "Fault tolerance" there: the bundles
of a lost node are placed on another one.
"""

from __future__ import annotations

import importlib
import select
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rankwise.errors import ConfigurationError, LaunchError
from rankwise.launch.hosts.ray_node import RayNode

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import ExitStack

    from rankwise.launch.agent.signals import PendingSignals
    from rankwise.launch.options import LaunchOptions

ANY_CLUSTER = "auto"
CONNECT_SECONDS = 5.0
"""How long the address of a cluster may take to answer."""
NOTICE_SECONDS = 5.0
"""After how long a wait for Ray's resources is logged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RayNeeds:
    """What a job needs of a cluster."""

    address: str = ANY_CLUSTER
    """``host:port``, or ``auto``: the cluster that this machine belongs to."""
    nodes: tuple[int, int] | None = None
    """The fewest and the most nodes; ``None``: as few as hold the ranks."""
    cpus_per_rank: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.cpus_per_rank, int) or self.cpus_per_rank < 1:
            raise ConfigurationError(f"cpus_per_rank must be >= 1, got {self.cpus_per_rank!r}.", do="pass 1 or more")
        if self.nodes is not None and not 1 <= self.nodes[0] <= self.nodes[1]:
            raise ConfigurationError(
                "nodes must be N, or MIN:MAX with 1 <= MIN <= MAX, got {}:{}.".format(*self.nodes),
                do="pass one number, or the fewest and the most: --nodes 1:4",
            )


# -- values --------------------------------------------------------------------------------------------


def ranks_of_nodes(
    on_nodes: Sequence[Mapping[str, float]],
    per_rank: Mapping[str, float],
    num_ranks: int | None,
    nodes: tuple[int, int] | None,
) -> list[int]:
    """Return how many ranks each node runs.

    Args:
        on_nodes: the resources of each node of the cluster.
        per_rank: what a rank needs of them.
        num_ranks: of the job; ``None``: one per GPU that the cluster has CPUs for, or one.
        nodes: as in :class:`RayNeeds`.

    Raises:
        ConfigurationError: there are more ranks than the cluster holds, or fewer than nodes.
    """
    room = sorted((_room(resources, per_rank) for resources in on_nodes), reverse=True)
    wanted = num_ranks or max(1, sum(room) if "GPU" in per_rank else 1)
    if nodes is not None:
        # The cluster may grow for them.
        if wanted < nodes[1]:
            raise ConfigurationError(
                f"{wanted} ranks cannot be divided among {nodes[1]} nodes.", do=f"pass -n {nodes[1]} or more"
            )
        return [wanted // nodes[1] + (number < wanted % nodes[1]) for number in range(nodes[1])]
    if wanted > sum(room):
        of_ranks = ", ".join(f"{amount:g} {name}" for name, amount in per_rank.items())
        raise ConfigurationError(
            f"{wanted} ranks with {of_ranks} each were requested, but this cluster of Ray holds {sum(room)}.",
            evidence="\n".join(_described(resources, per_rank) for resources in on_nodes),
            do=f"pass {f'-n {sum(room)}' if sum(room) else 'less per rank'}, or add nodes (ray start); "
            "if the cluster grows on demand, pass the number of nodes to wait for: --nodes 2"
            + ("; --device cpu runs the ranks without GPUs" if "GPU" in per_rank else ""),
        )
    counts: list[int] = []
    for most in room:
        counts.append(min(most, wanted - sum(counts)))
    return [count for count in counts if count]


def _room(resources: Mapping[str, float], per_rank: Mapping[str, float]) -> int:
    return min(int(resources.get(name, 0.0) // amount) for name, amount in per_rank.items())


def _described(resources: Mapping[str, float], per_rank: Mapping[str, float]) -> str:
    address = next((name[5:] for name in resources if name.startswith("node:") and "__" not in name), "a node")
    has = ", ".join(f"{resources.get(name, 0.0):g} {name}" for name in per_rank)
    return f"{address} has {has}: {_room(resources, per_rank)} ranks"


def needs_of_rank(on_nodes: Sequence[Mapping[str, float]], needs: RayNeeds, options: LaunchOptions) -> dict[str, float]:
    """Return what Ray reserves for each rank: its CPUs, and a GPU if the cluster has some."""
    has_gpus = options.device != "cpu" and any(resources.get("GPU", 0) >= 1 for resources in on_nodes)
    return {"CPU": float(needs.cpus_per_rank), **({"GPU": 1.0} if has_gpus else {})}


# -- a real one ----------------------------------------------------------------------------------------


def connect(address: str, closing: ExitStack) -> Any:
    """Return the module ``ray``, connected to a cluster; one that was connected here is left when ``closing`` ends.

    Raises:
        ConfigurationError: Ray is not installed, or no cluster answers.
    """
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError as error:
        raise ConfigurationError(
            "Ray is not installed here.", evidence=str(error), do="pip install 'rankwise[ray]'"
        ) from None
    if ray.is_initialized():
        return ray
    host, colon, port = address.rpartition(":")
    if "://" in address:
        raise ConfigurationError(
            f"{address} is the address of a Ray client, which the nodes cannot reach.",
            do="run this on a machine of the cluster, or submit it: ray job submit --address http://HOST:8265 "
            "--working-dir . -- rankwise run --ray ...",
        )
    try:
        if colon:
            socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
        ray.init(address=address, log_to_driver=False, logging_level="WARNING")
    except (OSError, ValueError) as error:
        where = "on this machine" if address == ANY_CLUSTER else f"at {address}"
        raise ConfigurationError(
            f"No cluster of Ray answers {where}.",
            evidence=str(error),
            do="start one: ray start --head; on the other machines: ray start --address=HOST:6379. Or pass the address "
            "of a running one: --ray=HOST:6379",
        ) from None
    closing.callback(ray.shutdown)
    return ray


class Reservation:
    """The resources of the job's nodes: a placement group, from its request to its end."""

    def __init__(self, ray: Any, counts: Sequence[int], per_rank: Mapping[str, float], *, is_spread: bool) -> None:
        self.ray = ray
        self.counts = counts
        self._util: Any = importlib.import_module("ray.util")
        self._strategies: Any = importlib.import_module("ray.util.scheduling_strategies")
        self.bundles = [{name: amount * count for name, amount in per_rank.items()} for count in counts]
        strategy = "STRICT_SPREAD" if is_spread else "PACK"
        self._group = self._util.placement_group(self.bundles, strategy=strategy)

    def wait(
        self, seconds: float, show: Callable[[str], None], signals: PendingSignals | None
    ) -> signal.Signals | None:
        """Wait for Ray to reserve them, or for a signal, which is returned.

        Raises:
            LaunchError: it did not within ``seconds``.
        """
        started, has_said = time.monotonic(), False
        words = "; ".join(", ".join(f"{amount:g} {name}" for name, amount in bundle.items()) for bundle in self.bundles)
        while not self._group.wait(1):
            waited = time.monotonic() - started
            if signals is not None and select.select([signals.fileno()], [], [], 0)[0]:
                return signals.next_received()
            if waited > seconds:
                raise LaunchError(
                    f"Ray did not reserve {words} within {seconds:.0f} s.",
                    evidence=f"free in the cluster: {self.ray.available_resources()}",
                    do="see what uses the cluster with `ray status`, or pass fewer ranks",
                )
            if waited > NOTICE_SECONDS and not has_said:
                has_said = True
                show(f"[rankwise] waiting for Ray to reserve {words}\n")
        return None

    def actor(self, number: int) -> Any:
        """Return a new actor in a bundle, on the node where Ray has it now."""
        bundle = self.bundles[number]
        strategy = self._strategies.PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=number
        )
        remote = self.ray.remote(RayNode).options(
            num_cpus=bundle["CPU"], num_gpus=bundle.get("GPU", 0), max_concurrency=4, scheduling_strategy=strategy
        )
        return remote.remote()

    def give_back(self) -> None:
        """Give everything back to the cluster; actors in it are ended."""
        self._util.remove_placement_group(self._group)
