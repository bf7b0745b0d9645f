# SPDX-License-Identifier: Apache-2.0
"""MegEngine's ways of joining a world, and its server and client.

A function runs on several ranks, or a process passes its own rank. The client shares values by name, in the job's
store.
"""

from __future__ import annotations

import functools
import json
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, overload

import torch

from rankwise.comm import collectives
from rankwise.comm.join import join
from rankwise.comm.point_to_point.message import pack, unpack
from rankwise.comm.session import Session, current
from rankwise.compat.megengine.device import GPU_TYPES, check_device_type, get_device_count
from rankwise.compat.megengine.distributed.groups import arguments_of
from rankwise.errors import ConfigurationError, PeerMissing
from rankwise.launch.function.launch import launcher as on_ranks_of_rankwise
from rankwise.store.wire import pack_fields, unpack_fields
from rankwise.world.device import accelerator
from rankwise.world.environments.process import read_process

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.store.client import Store

P = ParamSpec("P")
T = TypeVar("T")


@overload
def launcher(
    func: Callable[P, T],
    n_gpus: int | None = None,
    world_size: int | None = None,
    rank_start: int = 0,
    master_ip: str = "localhost",
    port: int = 0,
    device_type: str = "xpu",
    backend: str = "auto",
) -> Callable[P, list[T]]: ...
@overload
def launcher(
    func: None = None,
    n_gpus: int | None = None,
    world_size: int | None = None,
    rank_start: int = 0,
    master_ip: str = "localhost",
    port: int = 0,
    device_type: str = "xpu",
    backend: str = "auto",
) -> Callable[[Callable[P, T]], Callable[P, list[T]]]: ...
def launcher(  # noqa: PLR0917 - as MegEngine has it
    func: Callable[P, T] | None = None,
    n_gpus: int | None = None,
    world_size: int | None = None,
    rank_start: int = 0,
    master_ip: str = "localhost",
    port: int = 0,
    device_type: str = "xpu",
    backend: str = "auto",
) -> Callable[P, list[T]] | Callable[[Callable[P, T]], Callable[P, list[T]]]:
    """Make a function run on several ranks, in a world that they have joined.

    Write ``@dist.launcher``, ``@dist.launcher(n_gpus=2)`` or ``dist.launcher(worker, n_gpus=2)(*args)``. With several
    machines each runs the script, with its own ``rank_start``. In a script that ``rankwise run`` has started, the
    function runs on the ranks that exist.

    Args:
        func: the function that every rank calls.
        n_gpus: the number of ranks on this machine, also without GPUs; default: one per GPU, or one without a GPU.
        world_size: the number of ranks on all machines, ``n_gpus`` on each; default: ``n_gpus``.
        rank_start: the first rank on this machine: 0 on the first one, ``n_gpus`` on the second, and so on.
        master_ip: address of one of the machines, the same on all.
        port: a free port there, for several machines.
        device_type: ``"xpu"`` uses GPUs if there are any, else the CPU; ``"gpu"``, ``"cuda"``, ``"rocm"`` require GPUs;
            ``"cpu"`` hides the GPUs.
        backend: ``"auto"``, ``"nccl"``, ``"rccl"``, ``"shm"`` or ``"gloo"``. (MegEngine's default was ``"nccl"``.)

    Returns:
        The function, which returns the values of this machine's ranks, in rank order; or a decorator.

    Raises:
        ConfigurationError: numbers are inconsistent, or there is no GPU; when the function is defined. When it is
            called: as :func:`rankwise.launch`, which raises the exception of the first rank to fail, with that rank's
            traceback as a note.

    Source: rankwise.launcher.
    """
    device = _device_of(device_type)
    num_here = get_device_count(device_type) if n_gpus is None else n_gpus
    nodes = _nodes(num_here, world_size, rank_start, master_ip, port)
    arguments: dict[str, Any] = {**arguments_of(backend), "device": "cpu" if device == "cpu" else None}

    def decorate(inner: Callable[P, T]) -> Callable[P, list[T]]:
        if not callable(inner):
            raise ConfigurationError(
                f"launcher requires a function, got {inner!r}.",
                do="write @dist.launcher, @dist.launcher(n_gpus=2), or dist.launcher(worker, n_gpus=2)()",
            )

        # wraps() copies the name by which pickle finds the decorated function.
        @functools.wraps(inner)
        def joined(*args: P.args, **kwargs: P.kwargs) -> T:
            with join(**arguments):
                return inner(*args, **kwargs)

        if _is_rank_of_rankwise():
            return _in_this_rank(inner, joined, arguments, n_gpus, world_size)
        return on_ranks_of_rankwise(ranks=num_here, device=device, **nodes)(joined)

    return decorate if func is None else decorate(func)


def init_process_group(  # noqa: PLR0917 - as MegEngine has it
    master_ip: str,
    port: int,
    world_size: int,
    rank: int,
    device: int,
    backend: str = "auto",
    device_type: str = "xpu",
) -> None:
    """Join the world that other processes join with the same address.

    Called by: every rank, once. Rank 0 opens the port itself: no server needs to be started first.

    Args:
        master_ip: address of rank 0's machine.
        port: a free port there.
        world_size: number of processes, 1 or more.
        rank: of this process.
        device: number of its GPU; not used without GPUs.
        backend: as for :func:`launcher`.
        device_type: as for :func:`launcher`.

    Raises:
        ConfigurationError: an argument is bad, or this process has joined already.
        PeerMissing: the other ranks did not join.

    Source: rankwise.join.
    """
    kinds: dict[str, tuple[object, type]] = {
        "master_ip": (master_ip, str),
        "port": (port, int),
        "world_size": (world_size, int),
        "rank": (rank, int),
        "device": (device, int),
    }
    for name, (value, kind) in kinds.items():
        if not isinstance(value, kind) or isinstance(value, bool):
            raise TypeError(f"{name} is of type {kind.__name__}, not {type(value).__name__}")
    hides_gpus = _device_of(device_type) == "cpu" or not accelerator.count()
    where = "cpu" if hides_gpus else accelerator.example(device)
    address = f"tcp://{_address(master_ip, port)}"
    join(device=where, init_method=address, rank=rank, world_size=world_size, **arguments_of(backend))


class Server:
    """Replaces MegEngine's server, which is not needed: rank 0 opens the port.

    Args:
        port: the port that is then passed to ``init_process_group``.

    Raises:
        ConfigurationError: no port was passed.
    """

    def __init__(self, port: int = 0) -> None:
        if not port:
            raise ConfigurationError(
                "Server cannot choose a port: rankwise runs no MegEngine server that could reserve it.",
                do="omit Server and pass a free port to init_process_group(); dist.launcher needs no port",
            )
        self.py_server_port = port


def _is_rank_of_rankwise() -> bool:
    with suppress(ConfigurationError):
        return read_process("rankwise").source == "rankwise"
    return False


def _in_this_rank(
    inner: Callable[P, T], joined: Callable[P, T], arguments: dict[str, Any], n_gpus: int | None, world_size: int | None
) -> Callable[P, list[T]]:
    """Return a function that calls ``inner`` on the ranks that exist, and returns the values of this machine's."""

    @functools.wraps(joined)
    def here(*args: P.args, **kwargs: P.kwargs) -> list[T]:
        found = read_process("rankwise")
        for name, given, there in (
            ("n_gpus", n_gpus, found.local_world_size),
            ("world_size", world_size, found.world_size),
        ):
            if given is not None and given != there:
                raise ConfigurationError(
                    f"launcher was given {name}={given}, but `rankwise run` started {there}.",
                    do=f"omit {name}, or start the script with `python`",
                )
        with join(**arguments) as world:
            values = collectives.all_gather_object(inner(*args, **kwargs))
            first = world.rank - world.local_rank
            return values[first : first + world.local_world_size]

    return here


def _device_of(device_type: str) -> Literal["auto", "cpu"]:
    check_device_type(device_type)
    if device_type in GPU_TYPES and not accelerator.count():
        raise ConfigurationError(
            f"device_type={device_type!r}, but torch finds no GPU on this machine.",
            do='omit device_type, or pass device_type="cpu"',
        )
    return "cpu" if device_type == "cpu" else "auto"


def _nodes(num_here: int, world_size: int | None, rank_start: int, master_ip: str, port: int) -> dict[str, Any]:
    """Return the arguments of rankwise's launcher for several machines; none for one machine."""
    if world_size is None or world_size == num_here:
        if not rank_start:
            return {}
        do = "pass world_size=, the number of ranks on all machines together"
    elif world_size < num_here:
        do = "pass world_size= n_gpus times the number of machines, or omit it"
    elif not port:
        do = f"on one machine, pass n_gpus={world_size}; on several, also pass the same port= on each"
    elif world_size % num_here or rank_start % num_here or rank_start >= world_size:
        do = (
            "start the same number of ranks on each machine, with rank_start= 0, n_gpus, 2 n_gpus; if machines "
            "differ, run `rankwise run -n ... --nodes ... --rendezvous host:port` on each"
        )
    else:
        rendezvous = _address(master_ip, port)
        return {"num_nodes": world_size // num_here, "node_rank": rank_start // num_here, "rendezvous": rendezvous}
    raise ConfigurationError(
        "launcher was given inconsistent numbers of ranks.",
        evidence=f"n_gpus={num_here}, world_size={world_size}, rank_start={rank_start}",
        do=do,
    )


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


PREFIX = "megengine/user"
CLIENT_POLL_SECONDS = 0.2
"""The interval at which a waiting rank checks whether another has failed."""


class Client:
    """Sets and gets values that all ranks share."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._alone: dict[str, bytes] = {}

    def user_set(self, key: str, val: object) -> bool:
        """Set the value of ``key``.

        Args:
            key: any string.
            val: tensor, NumPy array, number, string, ``None``, ``tensor.shape`` or ``tensor.dtype``, or a list, tuple
                or dict of them. Nothing is pickled.

        Raises:
            ConfigurationError: ``key`` is not a string, or ``val`` contains something else.
        """
        content = _bytes_of(val)
        store = self._store(key)
        if store is None:
            self._alone[key] = content
        else:
            store.set(key, content)
        return True

    def user_get(self, key: str) -> Any:
        """Return the value of ``key``, once a rank has set it. Tensors are on the CPU.

        Raises:
            PeerMissing: no rank set it within ``join(timeout_seconds=...)``.
            PeerFailed: a rank failed meanwhile.
        """
        return _value_of(self._content(key))

    def user_pop(self, key: str) -> Any:
        """Return the value of ``key``, as :meth:`user_get` does, and remove it.

        Called by: one rank for each ``user_set``.
        """
        value = self.user_get(key)
        store = self._store(key)
        if store is None:
            self._alone.pop(key, None)
        else:
            store.delete(key)
        return value

    def group_barrier(self, key: str, size: int) -> None:
        """Return when every rank of a group has called it.

        Called by: every rank of the group.

        Args:
            key: of the group: ``group.key``.
            size: the number of its ranks.

        Raises:
            ConfigurationError: it is not the group of all ranks; other groups cannot be found by their key.
        """
        world_size = self._session.world.world_size
        if size != world_size or key != ",".join(map(str, range(world_size))):
            raise ConfigurationError(
                f"wait_for does not accept the ranks {key} as a key.", do="use dist.group_barrier(group)"
            )
        collectives.barrier()

    def _content(self, key: str) -> bytes:
        store, detector = self._store(key), self._session.detector
        if store is None or detector is None:
            if key not in self._alone:
                raise self._timed_out(key, 0.0)
            return self._alone[key]
        end = time.monotonic() + detector.timeout_seconds
        while True:
            try:
                return store.get(key, CLIENT_POLL_SECONDS)
            except TimeoutError:
                if detector.error is not None:
                    raise detector.error from None
                if time.monotonic() > end:
                    raise self._timed_out(key, detector.timeout_seconds) from None

    def _timed_out(self, key: str, waited: float) -> PeerMissing:
        world = self._session.world
        others = [rank for rank in range(world.world_size) if rank != world.rank]
        return PeerMissing(
            f"user_get({key!r}) timed out after {waited:.0f} s: no rank has set it.",
            ranks=others,
            where=str(world),
            do=f"call dist.get_client().user_set({key!r}, ...) on one rank first; user_pop() removes the value",
        )

    def _store(self, key: object) -> Store | None:
        if current() is not self._session:
            raise ConfigurationError(
                "This client belongs to a world that has been left.", do="call dist.get_client() again"
            )
        if not isinstance(key, str) or not key:
            raise ConfigurationError(f"A key must be a str, not {key!r}.", do="pass str(key)")
        return None if self._session.store is None else self._session.store.prefixed(PREFIX)


def get_client() -> Client:
    """Return the client that sets and gets values shared by all ranks.

    Raises:
        NotJoined: no world has been joined.
    """
    return current().once(Client)


def _bytes_of(value: object) -> bytes:
    try:
        with torch.no_grad():
            packed = pack(value)
    except ConfigurationError as error:
        raise ConfigurationError(
            error.what.replace("send cannot send", "user_set cannot set"),
            do="pass tensors, NumPy arrays, numbers and strings, in lists, tuples and dicts; use "
            "rankwise.broadcast_object() for other objects",
        ) from None
    return pack_fields([json.dumps(packed.tree).encode(), *map(bytes, packed.buffers)])


def _value_of(content: bytes) -> Any:
    head, *parts = unpack_fields(content)
    buffers = [
        torch.frombuffer(bytearray(part), dtype=torch.uint8) if part else torch.empty(0, dtype=torch.uint8)
        for part in parts
    ]
    return unpack(json.loads(head), buffers, torch.device("cpu"))[0]
