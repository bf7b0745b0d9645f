# SPDX-License-Identifier: Apache-2.0
"""One copy of a dataset per node, used by all its ranks.

In order: which rank reads, and how the others find the result; one object stored in one file, with the bytes of
tensors, arrays and long lists as they are used, and the rest in one pickle.
"""

from __future__ import annotations

import fcntl
import io
import mmap
import os
import pickle
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, overload

import numpy as np
import numpy.typing as npt
import torch

from rankwise.comm.agreement import all_ranks_succeed
from rankwise.comm.collectives import all_gather_object
from rankwise.comm.session import current
from rankwise.errors import DatasetError
from rankwise.log import warn
from rankwise.torch_private.tensors import typed_storage, untyped_storage_of

if TYPE_CHECKING:
    from collections.abc import Callable


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


_ALIGNMENT_BYTES = 64
_LONG_LIST = 1024
"""A list of at least this many items is stored item by item, each unpickled when it is used."""

_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
"""Not named by Python 3.11. Without it the kernel may refuse a mapping larger than the free memory."""


def pack(value: object, file: BinaryIO) -> tuple[int, int]:
    """Write ``value`` to an empty file and return the place of its pickle: ``(offset, size)`` in bytes.

    Raises:
        Exception: any that pickling ``value`` raises.
    """
    writer = _Writer(file)
    stream = io.BytesIO()
    _Pickler(stream, writer).dump(value)
    return writer.add(stream.getbuffer())


def unpack(file_descriptor: int, place: tuple[int, int]) -> Any:
    """Return the value that :func:`pack` wrote; its large parts are the mapped file itself.

    The mapping is copy-on-write: a process that writes into a tensor or array gets private copies of
    the pages it writes, which take memory and are invisible to other processes. (Torch has no
    read-only tensors: with a read-only mapping a write would end the process without a traceback.)
    The descriptor may be closed afterwards.
    """
    flags, prot = mmap.MAP_PRIVATE | _MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
    mapping = mmap.mmap(file_descriptor, 0, flags=flags, prot=prot)
    return _Reader(mapping).load(place)


class PackedList(Sequence[Any]):
    """A long list stored item by item: each use of an item unpickles it again. Read-only."""

    def __init__(self, items: memoryview, ends: npt.NDArray[np.int64], load: Callable[[memoryview], Any]) -> None:
        self._items = items
        self._ends = ends
        self._load = load

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> Any: ...

    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        start = self._ends[place - 1] if place else 0
        return self._load(self._items[start : self._ends[place]])

    def __repr__(self) -> str:
        return f"<PackedList of {len(self)} items>"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a plain list: only processes forked from this one see the mapping."""
        return (list, (list(self),))


class _Writer:
    """Appends aligned blocks to a file, each piece of memory once."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._end = 0
        self._pointers: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        self._kept: list[object] = []

    def add(self, block: bytes | memoryview) -> tuple[int, int]:
        """Append ``block`` and return its ``(offset, size)`` in bytes."""
        padding = -self._end % _ALIGNMENT_BYTES
        self._file.write(b"\0" * padding)
        self._file.write(block)
        offset, size = self._end + padding, memoryview(block).nbytes
        self._end = offset + size
        return offset, size

    def once(self, memory: tuple[Any, ...], owner: object, write: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
        """Return the pointer from ``write()``, which appends the content of ``owner``, once for the same memory.

        The owner is kept alive, so that the address of its memory is not reused.
        """
        if memory not in self._pointers:
            self._pointers[memory] = write()
            self._kept.append(owner)
        return self._pointers[memory]


class _Pickler(pickle.Pickler):
    """Puts large values into separate blocks, and pointers to them into the pickle."""

    def __init__(self, stream: io.BytesIO, writer: _Writer) -> None:
        super().__init__(stream, protocol=5)
        self._writer = writer
        self.num_pointers = 0

    def persistent_id(self, obj: Any) -> tuple[Any, ...] | None:
        """Return a pointer for an object stored outside the pickle, ``None`` for the rest."""
        kind = type(obj)
        if kind is list:
            if len(obj) < _LONG_LIST:
                return None
            pointer = self._writer.once(("list", id(obj)), obj, lambda: self._write_list(obj))
        elif kind is np.ndarray or kind is np.memmap:
            if obj.dtype.hasobject or not obj.nbytes:
                return None
            memory = (
                "array",
                obj.ctypes.data,
                obj.shape,
                obj.strides,
                obj.dtype.str,
                str(obj.dtype),
            )
            pointer = self._writer.once(memory, obj, lambda: self._write_array(obj))
        elif kind is torch.UntypedStorage:
            if not _lies_in_memory(obj):
                return None
            memory = ("storage", obj.data_ptr(), obj.nbytes())
            pointer = self._writer.once(memory, obj, lambda: self._write_storage(obj))
        else:
            return None
        self.num_pointers += 1
        return pointer

    def reducer_override(self, obj: Any) -> Any:
        """Pickle a typed storage as its untyped storage; torch would pickle its bytes."""
        if type(obj) is torch.storage.TypedStorage and _lies_in_memory(untyped_storage_of(obj)):
            return typed_storage, (untyped_storage_of(obj), obj.dtype)
        return NotImplemented

    def _write_list(self, items: list[Any]) -> tuple[Any, ...]:
        stream = io.BytesIO()
        pickler = _Pickler(stream, self._writer)
        ends = np.empty(len(items), dtype=np.int64)
        for number, item in enumerate(items):
            pickler.clear_memo()
            pickler.dump(item)
            ends[number] = stream.tell()
        block = self._writer.add(stream.getbuffer())
        return ("list", block, self._writer.add(ends.data), pickler.num_pointers > 0)

    def _write_array(self, array: npt.NDArray[Any]) -> tuple[Any, ...]:
        is_fortran = array.flags.f_contiguous and not array.flags.c_contiguous
        flat = (array.T if is_fortran else np.ascontiguousarray(array)).reshape(-1)
        # As bytes, because not every dtype (dates) supports the buffer protocol.
        block = self._writer.add(flat.view(np.uint8).data)
        return ("array", block, array.dtype, array.shape, "F" if is_fortran else "C")

    def _write_storage(self, storage: torch.UntypedStorage) -> tuple[Any, ...]:
        view = torch.empty(0, dtype=torch.uint8).set_(storage)
        return ("storage", self._writer.add(view.numpy().data))


class _Reader:
    """Unpickles from a mapping; tensors, arrays and long lists become views of it."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self._mapping = mapping
        self._view = memoryview(mapping)
        self._storages: dict[int, torch.UntypedStorage] = {}

    def load(self, place: tuple[int, int]) -> Any:
        offset, size = place
        return self.load_item(self._view[offset : offset + size])

    def load_item(self, pickled: memoryview) -> Any:
        return _Unpickler(io.BytesIO(pickled), self).load()

    def follow(self, pointer: tuple[Any, ...]) -> Any:
        kind, (offset, size), *rest = pointer
        if kind == "storage":
            if offset not in self._storages:
                whole = torch.frombuffer(self._mapping, dtype=torch.uint8, count=size, offset=offset)
                self._storages[offset] = whole.untyped_storage()
            return self._storages[offset]
        if kind == "array":
            dtype, shape, order = rest
            return np.ndarray(shape, dtype, buffer=self._mapping, offset=offset, order=order)
        (ends_offset, ends_size), has_pointers = rest
        ends = np.ndarray((ends_size // 8,), np.int64, buffer=self._mapping, offset=ends_offset)
        load = self.load_item if has_pointers else pickle.loads
        return PackedList(self._view[offset : offset + size], ends, load)


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, reader: _Reader) -> None:
        super().__init__(stream)
        self._reader = reader

    def persistent_load(self, pid: Any) -> Any:
        return self._reader.follow(pid)


def _lies_in_memory(storage: torch.UntypedStorage) -> bool:
    return storage.device.type == "cpu" and storage.nbytes() > 0
