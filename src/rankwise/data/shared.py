# SPDX-License-Identifier: Apache-2.0
"""One copy of a dataset per node, used by all its ranks.

Decides which rank reads, and how the others find the result; ``packed`` has the layout.
"""

from __future__ import annotations

import fcntl
import os
import pickle
from contextlib import ExitStack
from typing import Any, NamedTuple

from rankwise.comm.agreement import all_ranks_succeed
from rankwise.comm.collectives import all_gather_object
from rankwise.comm.session import current
from rankwise.data.packed import pack, unpack
from rankwise.errors import DatasetError
from rankwise.log import warn

_TOKEN_BYTES = 16


class _Published(NamedTuple):
    """Where the first rank of a node keeps the node's copy."""

    node_rank: int
    pid: int
    file_descriptor: int
    place: tuple[int, int]
    token: str
    """The last bytes of the file, in hexadecimal digits: they identify the right file."""


def share(dataset: Any) -> Any:
    """Return ``dataset`` so that the ranks of a node share one copy of it in memory.

    The first rank of each node writes its dataset into anonymous shared memory, and every
    rank of the node maps it; the bytes of tensors, NumPy arrays and lists of 1024 or more items
    exist once, for loader workers too. The memory is freed when the last process that maps it
    exits, in any way. ::

        train_set = rw.share(lambda: torch.load("train.pt"))     # read by one rank of each node

    The copy is for reading. A process that writes into it changes only its own view (and that of workers forked
    from it later); each written page then takes private memory. A
    long list becomes a read-only sequence that unpickles an item each time it is used. While
    the first rank writes, it holds the dataset twice.

    Called by: every rank, in the same order.

    Args:
        dataset: a function that returns the dataset, called on the first rank of each node only; or
            the dataset itself, of which the other ranks then drop theirs. It must be picklable
            if there are several ranks on a node.

    Returns:
        An object of the same class. If a rank is alone on its node, the dataset itself.

    Raises:
        DatasetError: the dataset cannot be pickled.
        PeerFailed: reading or writing it failed on another rank.
        NotJoined: there is no world.
    """
    world = current().world
    if world.world_size == 1:
        return _made(dataset)
    value: Any = None
    published: _Published | None = None
    with ExitStack() as until_all_have_mapped:
        with all_ranks_succeed("share: reading the dataset"):
            if world.local_rank == 0:
                value = _made(dataset)
                if world.local_world_size > 1:
                    published = _publish(value, world.node_rank)
                    until_all_have_mapped.callback(os.close, published.file_descriptor)
        on_this_node = [
            report
            for report in all_gather_object(published)
            if report is not None and report.node_rank == world.node_rank
        ]
        with all_ranks_succeed("share: mapping the dataset"):
            if on_this_node:
                value = None  # The first rank frees its own copy before it maps the shared one.
                value = _mapped(on_this_node[0], dataset)
    return value


def _made(dataset: Any) -> Any:
    """Return the dataset, calling the function that creates it."""
    kind = type(dataset)
    makes_one = callable(dataset) and not hasattr(kind, "__getitem__") and not hasattr(kind, "__iter__")
    return dataset() if makes_one else dataset


def _publish(value: object, node_rank: int) -> _Published:
    """Write ``value`` into memory without a name; the file descriptor returned keeps it."""
    descriptor = os.memfd_create("rankwise-share", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    token = os.urandom(_TOKEN_BYTES)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            place = pack(value, file)
            file.write(token)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        os.close(descriptor)
        raise DatasetError(
            f"The dataset cannot be pickled, which sharing requires: {error}",
            where=str(current().world),
            do="define its classes and functions at the top level of a module (no lambdas), and "
            "open files when a sample is read; or create one on each rank, without share()",
        ) from error
    except BaseException:
        os.close(descriptor)
        raise
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return _Published(node_rank, os.getpid(), descriptor, place, token.hex())


def _mapped(published: _Published, dataset: Any) -> Any:
    """Return the node's copy; if it cannot be reached, warn and return a private one."""
    try:
        descriptor = _found(published)
    except OSError as error:
        warn(
            "share: this rank cannot map its node's copy of the dataset and makes its own, "
            f"which takes the memory of another copy ({error}). Ranks of one node must run in one "
            "container, as one user.",
            all_ranks=True,
        )
        return _made(dataset)
    try:
        return unpack(descriptor, published.place)
    finally:
        os.close(descriptor)


def _found(published: _Published) -> int:
    """Return a descriptor of the published file.

    Raises:
        OSError: this process may not open it, or finds another one in its place.
    """
    path = f"/proc/{published.pid}/fd/{published.file_descriptor}"
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    size = os.fstat(descriptor).st_size
    if size < _TOKEN_BYTES or os.pread(descriptor, _TOKEN_BYTES, size - _TOKEN_BYTES) != bytes.fromhex(published.token):
        os.close(descriptor)
        raise OSError(f"{path} is not the file that the first rank of the node wrote")
    return descriptor
