# SPDX-License-Identifier: Apache-2.0
"""Makes torch's own ``env://`` find the job's store, and ``tcp://`` torch's, in a rank that the launcher started.

For scripts and libraries that call ``torch.distributed.init_process_group()`` themselves: the store requires the job's
secret, which torch's client does not know. Workers that ``torch.multiprocessing.spawn`` starts get these handlers too,
other programs that a rank starts have torch's own. Imported by the worker.
"""

from __future__ import annotations

import itertools
import os
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from rankwise.errors import ConfigurationError, EnvironmentConflict
from rankwise.torch_private.processes import follow_spawns, replace_handler
from rankwise.world import network
from rankwise.world.environments import table

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping
    from datetime import timedelta

    import torch.distributed as dist

    from rankwise.store.client import Store
    from rankwise.world.environments.reading import Reading

    Rendezvous = Iterator[tuple[dist.Store, int, int]]

TORCH_PREFIX = "torch/"
"""Prefix of the keys of the group that ranks open through torch's own ``env://``, among those of an attempt."""
SERVED = "TORCHELASTIC_USE_AGENT_STORE"
"""Tells torch that no rank serves the store; torch reads nothing else from it, not even the address."""

NOT_A_RANK = 0
"""In place of the number of a rank's process."""

_kept: list[Store] = []
"""Torch keeps only the C++ half of a store that is written in Python."""
_served_worlds = itertools.count(1)
"""Numbers the worlds of this process in torch's store."""


def torch_rank_key(rank: int) -> str:
    """Return the key that a rank sets, among those of an attempt, when it starts to open torch's own group."""
    return f"rankwise/torch_ranks/{rank}"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Handlers:
    """Torch's handlers, and the launcher's variables of this rank: a script may change them later."""

    process: int
    reading: Reading
    master: tuple[str, int]
    is_served: bool
    env: Callable[..., Rendezvous]
    tcp: Callable[..., Rendezvous]

    @property
    def has_torch_store(self) -> bool:
        """Whether the master address differs from that of the job's own store."""
        return self.master != self.reading.address


def follow(variables: Mapping[str, str]) -> None:
    """Replace torch's handlers of ``env://`` and ``tcp://`` in this rank, whose variables are given."""
    _replace(variables, os.getpid())
    if SERVED in variables:
        follow_spawns(partial(_Worker, {name: variables[name] for name in variables}))


@dataclass(frozen=True, slots=True)
class _Worker:
    """A function that ``torch.multiprocessing.spawn`` runs, with these handlers.

    Torch's would wait for a store that no process serves if the function chooses an address of its own.
    """

    variables: dict[str, str]
    fn: Callable[..., object]

    def __call__(self, *arguments: object) -> object:
        _replace(self.variables, NOT_A_RANK)
        return self.fn(*arguments)


def _replace(variables: Mapping[str, str], process: int) -> None:
    handlers: list[_Handlers] = []

    def env(url: str, **more: Any) -> Rendezvous:
        return _rendezvous_by_env(handlers[0], url, more)

    def tcp(url: str, **more: Any) -> Rendezvous:
        return _rendezvous_by_tcp(handlers[0], url, more)

    handlers.append(
        _Handlers(
            process=process,
            reading=table.read(variables),
            master=(variables["MASTER_ADDR"], int(variables["MASTER_PORT"])),
            is_served=SERVED in variables,
            env=replace_handler("env", env),
            tcp=replace_handler("tcp", tcp),
        )
    )


def _rendezvous_by_env(told: _Handlers, url: str, more: dict[str, Any]) -> Rendezvous:
    reading = told.reading
    rank = _asked(url, "rank", "RANK", reading.rank)
    world_size = _asked(url, "world_size", "WORLD_SIZE", reading.world_size)
    address = _address_in_variables(told)
    is_world_of_job = (rank, world_size) == (reading.rank, reading.world_size)
    is_elsewhere = address != told.master
    # A fork of this rank belongs to a world that the script creates.
    is_fork = os.getpid() != told.process
    if (is_elsewhere or told.has_torch_store) if is_fork else (is_elsewhere and not is_world_of_job):
        return _rendezvous_as_torch(told, address, partial(told.env, url, **more))
    if not is_world_of_job:
        raise _contradiction(reading, rank, world_size)
    return _rendezvous_in_job(reading, more.get("timeout"))


def _rendezvous_in_job(reading: Reading, timeout: timedelta | None) -> Rendezvous:
    # Already in memory in a rank; a process that only starts ranks need not wait for torch.
    from rankwise.store import opening  # noqa: PLC0415

    if reading.address is None or reading.secret is None:
        message = "the launcher has not set the address of the job's store for this rank"
        raise RuntimeError(message)
    limit = {} if timeout is None else {"timeout_seconds": timeout.total_seconds()}
    opened = opening.connect(*reading.address, **limit, secret=reading.secret.encode())
    _kept.append(opened)
    opened.set(f"attempt/{reading.attempt}/{torch_rank_key(reading.rank)}", "")
    # Torch uses the same keys for successive worlds: the next must not find the addresses of the previous one.
    prefix = f"attempt/{reading.attempt}/{TORCH_PREFIX}{len(_kept)}"
    yield opened.prefixed(prefix).torch_store, reading.rank, reading.world_size
    message = "env:// cannot be joined again under rankwise's launcher, which restarts ranks after a failure"
    raise RuntimeError(message)


def _rendezvous_by_tcp(told: _Handlers, url: str, more: dict[str, Any]) -> Rendezvous:
    parts = urlsplit(url)
    address = (parts.hostname or "", parts.port or 0)
    own = told.reading.address
    if own is not None and not told.has_torch_store and _is_same(address, own):
        raise ConfigurationError(
            f"init_method={url.partition('?')[0]!r} is rankwise's own store, which torch's client cannot use: "
            "it requires the job's secret.",
            evidence="this job was started without torch's store: --torch-store off, or several machines",
            do='remove init_method, or pass "env://"; or start the job with --torch-store on, which accepts '
            "every process that reaches that port",
        )
    return _rendezvous_as_torch(told, address, partial(told.tcp, url, **more))


def _rendezvous_as_torch(told: _Handlers, address: tuple[str, int], rendezvous: Callable[[], Rendezvous]) -> Rendezvous:
    """Meet as torch does; torch is told of a served store only at the address of that store."""
    is_served = told.is_served and _is_same(address, told.master)
    with _torch_told(is_served=is_served):
        try:
            store, rank, world_size = next(rendezvous())
        except RuntimeError as error:
            if told.process != NOT_A_RANK or "EADDRINUSE" not in str(error):
                raise
            raise _served_twice(told, address) from error
    if is_served:
        number = next(_served_worlds)
        if number > 1:
            import torch.distributed as dist  # noqa: PLC0415 - in memory already

            # As above. The first has no prefix: other programs, which use none, may join it too.
            store = dist.PrefixStore(f"world/{number}", store)
    yield store, rank, world_size
    message = "this world cannot be joined again"
    raise RuntimeError(message)


@contextmanager
def _torch_told(*, is_served: bool) -> Generator[None]:
    before = os.environ.get(SERVED)
    os.environ[SERVED] = str(is_served)
    try:
        yield
    finally:
        if before is None:
            del os.environ[SERVED]
        else:
            os.environ[SERVED] = before


def _asked(url: str, name: str, variable: str, told: int) -> int:
    """Return a number that torch was given, or takes from a variable; torch's -1 means none."""
    given = parse_qs(urlsplit(url).query).get(name, [""])[0]
    return int(given) if given not in {"", "-1"} else int(os.environ.get(variable) or told)


def _address_in_variables(told: _Handlers) -> tuple[str, int]:
    host, port = told.master
    return os.environ.get("MASTER_ADDR") or host, int(os.environ.get("MASTER_PORT") or port)


def _is_same(address: tuple[str, int], other: tuple[str, int]) -> bool:
    """Return whether two addresses are the same; ``localhost`` is ``127.0.0.1``."""
    if address[1] != other[1]:
        return False
    try:
        return address[0] == other[0] or not set(network.resolve(address[0])).isdisjoint(network.resolve(other[0]))
    except ConfigurationError:
        return False


def _served_twice(told: _Handlers, address: tuple[str, int]) -> ConfigurationError:
    reading = told.reading
    return ConfigurationError(
        f"A process that rank {reading.rank} of {reading.world_size} has started cannot serve a world at "
        f"{address[0]}:{address[1]}: the port is in use.",
        evidence=f"each of the {reading.world_size} ranks runs the whole script, and starts processes of its own",
        do="let the script start its processes alone: python train.py, or rankwise run -n 1 train.py\n"
        "or remove torch.multiprocessing.spawn from it, and call rankwise.join()",
    )


def _contradiction(reading: Reading, rank: int, world_size: int) -> EnvironmentConflict:
    do = "do not pass rank and world_size, and do not change RANK and WORLD_SIZE"
    if world_size != reading.world_size:
        do += f", or start {world_size} ranks: rankwise run -n {world_size}"
    return EnvironmentConflict(
        f"init_process_group() was called for rank {rank} of {world_size}, but this process is rank {reading.rank} of "
        f"{reading.world_size}.",
        evidence=f"the launcher: RANK={reading.rank} WORLD_SIZE={reading.world_size}\n"
        f"the script: rank={rank} world_size={world_size}, from its arguments or from variables that it changed",
        do=f"{do}; for a second world, also pass init_method or store",
    )
