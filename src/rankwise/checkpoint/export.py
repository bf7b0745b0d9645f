# SPDX-License-Identifier: Apache-2.0
"""Weights as one plain safetensors file, however a model is distributed over the ranks.

The file uses the names that the model has on one device, and nothing specific to rankwise.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import math
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from rankwise.checkpoint import files, folder
from rankwise.checkpoint.content import gather, refuse_lazy, unwrapped
from rankwise.checkpoint.folder import commit, make_folder
from rankwise.checkpoint.manifest import whole
from rankwise.comm.agreement import CollectiveRanks
from rankwise.comm.collectives import broadcast
from rankwise.comm.session import current, current_or_none
from rankwise.errors import CheckpointError, ConfigurationError, bytes_text, fold_values
from rankwise.tensors.arrays import as_sent, bytes_of, memory_of_values

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import BinaryIO

    from rankwise.checkpoint.content import Gathered
    from rankwise.checkpoint.layouts import TensorLayout
    from rankwise.checkpoint.manifest import Json
    from rankwise.comm.agreement import CheckpointRanks

CHUNK_BYTES = 64 * 2**20
"""How much of a tensor is sent to rank zero at a time."""
CONFIRM_BYTES = 2**30
"""After this many bytes the ranks check that rank zero could write them."""

_WEIGHTS = "weights"


def save_weights(path: str | os.PathLike[str], model: torch.nn.Module | Mapping[str, torch.Tensor], /) -> Path:
    """Write a model's weights as one safetensors file that other tools can read.

    Called by: every rank, with the same path and the same model. Works without a joined world too.

    The model may be replicated, sharded, split by tensor parallelism, in a pipeline, or several of these: the file
    holds its ``state_dict()`` under the names it has on one device. Tied weights are written once; the names left out
    are in the file's metadata, as ``safetensors.torch.save_model`` puts them there. Rank zero writes, and holds
    one tensor at a time; what it does not hold is broadcast to all ranks, in pieces. Optimizer state and
    everything else that training resumes from belongs in a checkpoint: :func:`rankwise.save`.

    Args:
        path: of the file, ``model.safetensors``. An existing file is replaced at the very end; if it is a link,
            its target is.
        model: a module, or tensors by name, as ``rankwise.load(...)["model"]``.

    Returns:
        The file's absolute path.

    Raises:
        CheckpointError: the disk is full, the folder cannot be written, a weight lies on no rank. A file that
            was at ``path`` before is still there.
        ConfigurationError: something is not a tensor, or has a dtype or name that such files do not support; ``path``
            is not a path, differs between ranks, or is a device, a pipe or a socket.
        PeerFailed: that happened on another rank.

    Source: the safetensors format; safetensors.torch.save_model for tied weights.
    """
    session = current_or_none()
    ranks = CollectiveRanks(session, "rankwise.save_weights()")
    if session is not None:
        session.prepare_save()
    weights = unwrapped(model)

    def check() -> tuple[str, str]:
        named = folder.path_of(path, call="save_weights()")
        _refuse_other_entries(weights)
        return str(named), str(named.absolute())

    reported = ranks.confirm("checking the weights to write", check)
    _refuse_different_paths([named for named, _ in reported])
    gathered = gather(ranks, {_WEIGHTS: weights})
    names, metadata = _names(gathered.objects[_WEIGHTS].state)
    layouts = {name: gathered.layouts[tensor] for name, tensor in names.items()}
    order = sorted(layouts, key=lambda name: (-files.dtype_of(layouts[name].dtype).itemsize, name))
    out = _WeightsFile(Path(reported[0][1]))  # Relative to rank zero's working directory.
    try:
        header = files.header({name: (layouts[name].dtype, layouts[name].shape) for name in order}, metadata)
        size_bytes = len(header) + sum(map(_num_bytes, layouts.values()))
        is_zero = ranks.rank == 0
        ranks.confirm(f"opening {out.target}", lambda: out.open(header, size_bytes) if is_zero else None)
        unconfirmed = 0
        for name in order:
            tensor = _gather_to_writer(ranks, gathered, names[name])
            if tensor is not None:
                out.append(tensor)
            unconfirmed += _num_bytes(layouts[name])
            if unconfirmed >= CONFIRM_BYTES:
                ranks.confirm(f"writing {out.target}", out.raise_failure)
                unconfirmed = 0
        ranks.confirm(f"writing {out.target}", out.finish)
    finally:
        out.discard()
    return out.target


def _refuse_different_paths(names: Sequence[str]) -> None:
    if len(set(names)) > 1:
        raise ConfigurationError(
            "save_weights() got different paths on different ranks.",
            evidence=f"{fold_values(dict(enumerate(names)))}\nnothing was written",
            do="pass the same path on every rank",
        )


def _refuse_other_entries(weights: object) -> None:
    tree: object = weights.state_dict() if isinstance(weights, torch.nn.Module) else weights
    if not isinstance(tree, Mapping):
        raise ConfigurationError(
            f"save_weights cannot write a {type(tree).__name__}.", do="pass a module, or tensors by name"
        )
    for name, value in cast("Mapping[object, object]", tree).items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise ConfigurationError(
                f"save_weights writes only tensors; {name!r} is a {type(value).__name__}.",
                do="leave it out: save_weights(path, {name: value ...}); rankwise.save() saves other state too",
            )
        refuse_lazy(name, value)
        if name == "__metadata__":
            raise ConfigurationError(
                "A tensor in a safetensors file cannot be named '__metadata__': the format reserves that name.",
                do="rename it",
            )
        if value.is_complex():
            raise ConfigurationError(
                f"{name} is {value.dtype}, which not every reader of safetensors files supports.",
                do="pass torch.view_as_real() of it, or use rankwise.save()",
            )


def _names(skeleton: Json) -> tuple[dict[str, str], dict[str, str]]:
    """Return the tensor of each name to write, and the file's metadata: the written name for each tied name."""
    tree = cast("dict[str, Any]", skeleton)
    entries: dict[str, dict[str, str]] = next(iter(tree.values()))
    name_of: dict[str, str] = {}
    metadata: dict[str, str] = {}
    for name, entry in entries.items():
        first = name_of.setdefault(entry["tensor"], name)
        if first != name:
            metadata[name] = first
    return {name: tensor for tensor, name in name_of.items()}, {**metadata, "format": "pt"}


def _num_bytes(layout: TensorLayout) -> int:
    return math.prod(layout.shape) * files.dtype_of(layout.dtype).itemsize


def _gather_to_writer(ranks: CheckpointRanks, gathered: Gathered, name: str) -> torch.Tensor | None:
    """Return a whole tensor on rank zero, ``None`` on the others.

    Called by: every rank. Every rank receives the pieces that rank zero lacks: all backends offer a broadcast.
    """
    layout = gathered.layouts[name]
    everything = whole(layout.shape)
    is_zero = ranks.rank == 0
    result: torch.Tensor | None = None
    if is_zero:
        if 0 in layout.holders.get(everything, ()):
            return gathered.held[name]
        result = torch.empty(layout.shape, dtype=files.dtype_of(layout.dtype))
    for region, holders in layout.holders.items():
        if 0 in holders:
            piece = gathered.held[name] if is_zero else None
        else:
            piece = _send(ranks, gathered.held.get(name), min(holders), region.shape, layout.dtype)
        if result is not None and piece is not None:
            result[region.within(everything)] = piece.detach().cpu()
    return result


def _send(
    ranks: CheckpointRanks, held: torch.Tensor | None, source: int, shape: tuple[int, ...], dtype: str
) -> torch.Tensor | None:
    """Return on rank zero what ``source`` holds."""
    device = current().world.device
    size_bytes = math.prod(shape) * files.dtype_of(dtype).itemsize
    mine = bytes_of(as_sent(held)) if held is not None and ranks.rank == source else None
    received = torch.empty(size_bytes if ranks.rank == 0 else 0, dtype=torch.uint8)
    for start in range(0, size_bytes, CHUNK_BYTES):
        end = min(start + CHUNK_BYTES, size_bytes)
        chunk = torch.empty(end - start, dtype=torch.uint8, device=device) if mine is None else mine[start:end]
        arrived = broadcast(chunk.to(device), source)
        if ranks.rank == 0:
            received[start:end] = arrived.cpu()
    return received.view(files.dtype_of(dtype)).view(shape) if ranks.rank == 0 else None


class _WeightsFile:
    """The file that rank zero writes: complete under its name, or absent. On other ranks it does nothing."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self._behind = Path(os.path.realpath(target))
        """The path that is written: ``target``, or what it links to."""
        self._staging: Path | None = None
        self._file: BinaryIO | None = None
        self._failure: CheckpointError | None = None
        self._size_bytes = 0

    def open(self, header: bytes, size_bytes: int) -> None:
        """Create the file, after making sure that the folder has room for all of it."""
        self._size_bytes = size_bytes
        try:
            self._refuse_other_kinds()
            make_folder(self._behind.parent)
            for left in self._behind.parent.glob(f".{glob.escape(self._behind.name)}.writing-*"):
                left.unlink()
            if shutil.disk_usage(self._behind.parent).free < size_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.target))  # noqa: TRY301 - worded below
            self._staging = self._behind.with_name(f".{self._behind.name}.writing-{secrets.token_hex(8)}")
            self._file = self._staging.open("xb")
            self._file.write(header)
        except OSError as error:
            raise self._worded(error) from error

    def _refuse_other_kinds(self) -> None:
        """Raise if the path is not a regular file: a rename would replace it by one."""
        if self._behind.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(self.target))
        if self._behind.exists() and not self._behind.is_file():
            raise ConfigurationError(
                f"{self.target} is a device, a pipe or a socket, not a file.",
                do="pass the path of a file: model.safetensors",
            )

    def append(self, tensor: torch.Tensor) -> None:
        """Write a tensor. A failure is kept until it can be reported to all ranks."""
        if self._file is not None and self._failure is None:
            try:
                self._file.write(memory_of_values(tensor))
            except OSError as error:
                self._failure = self._worded(error)

    def raise_failure(self) -> None:
        """Raise the error since the last call, if there was one."""
        if self._failure is not None:
            raise self._failure

    def finish(self) -> None:
        """Sync the file to disk, then rename it to its final name."""
        self.raise_failure()
        if self._file is None or self._staging is None:
            return
        try:
            self._file.close()
            commit(self._staging, self._behind)
        except OSError as error:
            raise self._worded(error) from error

    def discard(self) -> None:
        """Remove the file if it was not renamed yet."""
        if self._file is not None and self._staging is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._staging.unlink(missing_ok=True)

    def _worded(self, error: OSError) -> CheckpointError:
        session = current_or_none()
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        return CheckpointError(
            f"{self.target} could not be written: {error.strerror or error}.",
            where=None if session is None else str(session.world),
            evidence=f"the weights need {bytes_text(self._size_bytes)}; a file that was there before is unchanged",
            do=f"free {bytes_text(self._size_bytes)} there, or use another folder"
            if is_full
            else f"pass a path that this user can write to; this one is in {self.target.parent}",
        )
