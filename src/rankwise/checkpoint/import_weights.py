# SPDX-License-Identifier: Apache-2.0
"""Weights from plain safetensors files into a model, however it is distributed over the ranks.

Checks everything before it changes anything; each rank reads its own regions only. Public.
"""

from __future__ import annotations

import difflib
import hashlib
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch

from rankwise.checkpoint import folder, layouts
from rankwise.checkpoint.content import refuse_lazy, unwrapped
from rankwise.checkpoint.files import dtype_name
from rankwise.checkpoint.manifest import whole
from rankwise.comm.agreement import CollectiveRanks
from rankwise.comm.session import current_or_none
from rankwise.errors import CheckpointError, ConfigurationError, fold_values
from rankwise.tensors.files import open_tensor_files

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from rankwise.comm.agreement import CheckpointRanks
    from rankwise.tensors.files import TensorFiles

M = TypeVar("M", bound="torch.nn.Module")

PIECE_BYTES = 64 * 2**20
"""How much of a tensor is compared at once."""
SAMPLE_BYTES = 4096
SAMPLES_PER_FILE = 16
"""Files are compared between ranks by samples spread over each file: different weights differ almost everywhere."""

_MOST_NAMES = 6
"""How many names an error lists."""


class _TensorRead(NamedTuple):
    """One tensor to be read: its name in the files, its key in the model, and the model's tensor."""

    name: str
    key: str
    here: torch.Tensor


def load_weights(path: str | os.PathLike[str], model: M, /) -> M:
    """Load plain safetensors files into a model, in place.

    Called by: every rank, with the same path and the same model. Works without a joined world too.

    The model may be replicated, sharded, split by tensor parallelism, in a pipeline or several of these; its
    parameters keep their memory, and each rank reads only what it holds, one tensor at a time. Names and shapes
    are checked first, on every rank, and that the ranks read the same files. Floating-point weights are converted to
    the model's dtype. For tied weights one name is enough; if the files have several, their values must be equal.

    Args:
        path: a ``.safetensors`` file, or a folder of them, with or without ``model.safetensors.index.json``.
        model: with the names and shapes of the files.

    Returns:
        ``model`` itself.

    Raises:
        CheckpointError: names are missing or unexpected, shapes differ, tied weights have different values, a file is
            damaged or differs between ranks; the model has not changed. Only if a disk fails while it is read may
            some of the model have changed.
        ConfigurationError: there are no such files, ``model`` is not a module, or its weights have no memory of
            their own on any rank.
        PeerFailed: that happened on another rank.
    """
    ranks = CollectiveRanks(current_or_none(), "rankwise.load_weights()")
    opened: list[TensorFiles] = []
    copies: list[_TensorRead] = []

    def compare() -> tuple[str, str, list[str]]:
        place = folder.path_of(path, call="load_weights()")
        module = unwrapped(model)
        if not isinstance(module, torch.nn.Module):
            raise ConfigurationError(
                f"load_weights() needs a module, got a {type(module).__name__}.",
                do="pass the model; use rankwise.load(...) or load_state_dict() for other objects",
            )
        opened.append(open_tensor_files(place))
        copies.extend(_copies(opened[0], module, ranks))
        elsewhere = [copy.key for copy in copies if layouts.is_elsewhere(copy.here)]
        return str(place), _fingerprint(opened[0]), elsewhere

    try:
        reported = ranks.confirm(f"comparing {path} with the model", compare)
        _refuse_different_files([(named, fingerprint) for named, fingerprint, _ in reported])
        nowhere = layouts.on_no_rank([keys for *_, keys in reported])
        if nowhere:
            raise ConfigurationError(
                f"{nowhere[0]} is on the meta device on every rank.",
                evidence=f"so are {len(nowhere) - 1} more weights",
                do="allocate the model first: model.to_empty(device=...); or load it while placing it: "
                "rankwise.place(model, checkpoint=...)",
            )
        ranks.confirm(f"loading {path}", lambda: _copy_all(opened[0], copies))
    finally:
        for one in opened:
            one.close()
    return model


def _refuse_different_files(files_of: Sequence[tuple[str, str]]) -> None:
    if len({fingerprint for _, fingerprint in files_of}) > 1:
        seen = {rank: f"{named}, contents {fingerprint[:8]}" for rank, (named, fingerprint) in enumerate(files_of)}
        raise CheckpointError(
            "The files have different contents on different ranks.",
            evidence=f"{fold_values(seen)}\nthe model has not changed",
            do="pass the same path on every rank; if each machine has its own copy, make the copies identical",
        )


def _fingerprint(files: TensorFiles) -> str:
    """Return a digest of the files' names, sizes and samples of their bytes. Reads little."""
    infos = dict(sorted(files.entries.items()))
    digest = hashlib.sha256(repr([(name, info.dtype, info.shape) for name, info in infos.items()]).encode())
    for path in dict.fromkeys(info.file for info in infos.values()):
        size_bytes = path.stat().st_size
        digest.update(str(size_bytes).encode())
        with path.open("rb") as file:
            for number in range(SAMPLES_PER_FILE):
                file.seek(max(size_bytes - SAMPLE_BYTES, 0) * number // (SAMPLES_PER_FILE - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _copies(files: TensorFiles, model: torch.nn.Module, ranks: CheckpointRanks) -> list[_TensorRead]:
    """Return the copies to make. Raises unless the names, shapes and dtypes in the files fit the model."""
    here = {key: value for key, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    _refuse_copies(model, here)
    keys_of: dict[object, list[str]] = {}
    for key, tensor in here.items():
        keys_of.setdefault(layouts.identity(tensor) if tensor.numel() else key, []).append(key)
    groups = list(keys_of.values())
    missing = [keys[0] for keys in groups if not any(key in files.entries for key in keys)]
    unexpected = [name for name in files.entries if name not in here]
    if missing or unexpected:
        raise CheckpointError(
            f"{files.path} does not hold the weights of this model: {len(missing)} are missing, "
            f"{len(unexpected)} are unexpected.",
            evidence=_names_text(missing, unexpected),
            do="build the model that the files were written from, or pass other files; nothing has changed",
        )
    for key, tensor in here.items():
        if key in files.entries and not (entry := files.entries[key]).fits(tensor):
            raise CheckpointError(
                f"{key} in {files.path} does not fit the model.",
                evidence=f"file: {dtype_name(entry.dtype)}{list(entry.shape)}\n"
                f"model: {dtype_name(tensor.dtype)}{list(tensor.shape)}",
                do="build the model that the files were written from, or pass other files; nothing has changed",
            )
    for number, keys in enumerate(groups):
        # One rank reads each of them: these may be the largest weights.
        if number % ranks.world_size == ranks.rank:
            _refuse_unequal(files, [key for key in keys if key in files.entries], here[keys[0]].dtype)
    names = [(next(key for key in keys if key in files.entries), keys[0]) for keys in groups]
    return [_TensorRead(name, key, here[key]) for name, key in names]


def _refuse_unequal(files: TensorFiles, names: list[str], dtype: torch.dtype) -> None:
    """Raise unless tensors that become one in the model are equal in the files."""
    rows = torch.Size(files.entries[names[0]].shape[:1]).numel()
    rows_at_once = max(rows * PIECE_BYTES // max(files.entries[names[0]].num_bytes, 1), 1)
    for name in names[1:]:
        for start in range(0, rows, rows_at_once):
            at = (slice(start, start + rows_at_once),) * bool(files.entries[name].shape)
            first, second = (files.read_slice(one, at).to(dtype).reshape(-1) for one in (names[0], name))
            if not torch.equal(first.view(torch.uint8), second.view(torch.uint8)):
                raise CheckpointError(
                    f"{names[0]} and {name} are one tensor in the model but differ in {files.path}.",
                    evidence="the model has not changed",
                    do="build the model without tying them, or remove the wrong one from the files",
                )


def _refuse_copies(model: torch.nn.Module, here: Mapping[str, torch.Tensor]) -> None:
    """Raise if ``state_dict()`` returns copies: writing into them would have no effect."""
    for key, tensor in here.items():
        refuse_lazy(key, tensor)
    own = {layouts.identity(tensor) for tensor in (*model.parameters(), *model.buffers())}
    for key, tensor in here.items():
        memory = layouts.local(tensor)
        if any(stride == 0 and size > 1 for stride, size in zip(memory.stride(), memory.shape, strict=True)):
            raise ConfigurationError(
                f"{key} cannot be loaded in place: it is an expanded tensor, whose elements share memory.",
                do=f"give it memory of its own, {key.rpartition('.')[2]}.clone(), or use model.load_state_dict()",
            )
        if tensor.numel() and layouts.identity(tensor) not in own:
            raise ConfigurationError(
                f"{key} cannot be loaded in place: state_dict() returns a copy of it.",
                do="use model.load_state_dict() with the tensors of the files",
            )


def _names_text(missing: list[str], unexpected: list[str]) -> str:
    lines: list[str] = []
    for name in missing[:_MOST_NAMES]:
        near = difflib.get_close_matches(name, unexpected, n=1)
        lines.append(f"missing: {name}" + (f" (the files have {near[0]})" if near else ""))
    lines += [f"unexpected: {name}" for name in unexpected[:_MOST_NAMES]]
    more = max(len(missing) - _MOST_NAMES, 0) + max(len(unexpected) - _MOST_NAMES, 0)
    return "\n".join([*lines, f"and {more} more"] if more else lines)


def _copy_all(files: TensorFiles, copies: list[_TensorRead]) -> None:
    for number, copy in enumerate(copies):
        region = layouts.region_of(copy.here, copy.key)
        if region is None:
            continue
        memory = layouts.local(copy.here)
        try:
            with torch.no_grad():
                if region == whole(tuple(copy.here.shape)):
                    files.read_into(copy.name, memory)
                else:
                    memory.copy_(files.read_slice(copy.name, region.within(whole(tuple(copy.here.shape)))))
        except CheckpointError as error:
            loaded = f"{number} of {len(copies)} weights were already loaded"
            error.supplement(evidence=f"{error.evidence or ''}\n{loaded}".strip())
            raise
