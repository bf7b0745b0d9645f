# SPDX-License-Identifier: Apache-2.0
"""Plain safetensors files, by the names of the tensors in them: one file, or a folder of several.

Reads one tensor or one region at a time, and nothing else of a file; writes nothing.
"""

from __future__ import annotations

import json
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import safetensors
import torch

from rankwise.errors import CheckpointError, ConfigurationError

if TYPE_CHECKING:
    import os
    from collections.abc import Generator, Mapping, Sequence
    from types import TracebackType

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"

CODES: dict[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
}
"""The format's name of each dtype."""

_DTYPES = {code: dtype for dtype, code in CODES.items()}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A file's entry for one of its tensors."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path

    @property
    def num_bytes(self) -> int:
        """How much memory the tensor takes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def fits(self, tensor: torch.Tensor) -> bool:
        """Return whether it can be read into ``tensor``: floating-point numbers are converted, others are not."""
        both_float = self.dtype.is_floating_point and tensor.dtype.is_floating_point
        return self.shape == tuple(tensor.shape) and (both_float or self.dtype == tensor.dtype)


class TensorFiles:
    """Open files and the tensors in them. A context manager.

    Reading raises CheckpointError if there is no tensor of a name, or if its file can no longer be read.
    """

    def __init__(self, path: Path, opened: Mapping[Path, Any], file_of: Mapping[str, Path]) -> None:
        self.path = path
        self._opened = dict(opened)
        self.entries: Mapping[str, TensorInfo] = {
            name: _info_of(name, file, self._opened[file]) for name, file in file_of.items()
        }

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor on the CPU, in memory of its own."""
        return self._mapped(name).clone()

    def read_slice(self, name: str, slices: tuple[slice, ...]) -> torch.Tensor:
        """Return a region of a tensor on the CPU, in memory of its own; the slices have step one."""
        return self._mapped(name)[slices].clone()

    def read_into(self, name: str, destination: torch.Tensor) -> None:
        """Copy a tensor into ``destination`` on any device, converted to its dtype."""
        with torch.no_grad():
            destination.copy_(self._mapped(name))

    def are_equal(self, names: Sequence[str]) -> bool:
        """Return whether tensors are the same to the last bit, dtypes and shapes too."""
        first, *others = (self._mapped(name) for name in names)
        return all(
            other.dtype == first.dtype
            and other.shape == first.shape
            and torch.equal(other.reshape(-1).view(torch.uint8), first.reshape(-1).view(torch.uint8))
            for other in others
        )

    def _mapped(self, name: str) -> torch.Tensor:
        """Return a tensor backed by the file's own pages: only what is accessed is read."""
        entry = self.entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self.path} has no tensor {name!r}.", do="ask for one of .entries")
        if not self._opened:
            raise CheckpointError(f"{self.path} is closed.", do="read inside the `with` block")
        with _damage_reported(entry.file):
            return self._opened[entry.file].get_tensor(name)

    def close(self) -> None:
        """Close the files. Tensors that were read stay valid."""
        for opened in self._opened.values():
            opened.__exit__(None, None, None)
        self._opened.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_tensor_files(path: str | os.PathLike[str]) -> TensorFiles:
    """Open one safetensors file, or all files of a folder, as one set of named tensors.

    In a folder, ``model.safetensors.index.json`` (or the only index there) maps each tensor to its file.
    Without an index all files of the folder are used, and no two may contain the same name.

    Args:
        path: a ``.safetensors`` file, a ``.safetensors.index.json`` file, or a folder with either.

    Raises:
        ConfigurationError: the path does not exist, or has no files of this format.
        CheckpointError: a file is damaged, lacks what the index names, or two contain the same name.

    Source: safetensors.safe_open; the index as transformers and diffusers write it.
    """
    place = Path(path)
    if not place.exists():
        raise ConfigurationError(
            f"{place} does not exist.", do="pass a .safetensors file, or a folder that contains some"
        )
    if place.is_file() and not place.name.endswith(".json"):
        return _opened(place, {place: None})
    index = _index_of(place) if place.is_dir() else place
    if index is not None:
        return _opened(place, _files_of_index(index))
    found = sorted(place.glob(f"*{SUFFIX}"))
    if not found:
        names = sorted(entry.name for entry in place.iterdir())
        raise ConfigurationError(
            f"{place} contains no {SUFFIX} file.",
            evidence="it contains " + (", ".join(names[:10]) + (", ..." if len(names) > 10 else "") or "nothing"),  # noqa: PLR2004 - enough to recognize the folder
            do="convert other formats first: safetensors.torch.save_file(torch.load(old, weights_only=True), new)",
        )
    return _opened(place, dict.fromkeys(found))


def _index_of(folder: Path) -> Path | None:
    usual = folder / f"model{INDEX_SUFFIX}"
    if usual.is_file():
        return usual
    others = sorted(folder.glob(f"*{INDEX_SUFFIX}"))
    if len(others) > 1:
        raise ConfigurationError(
            f"{folder} holds {len(others)} indices.",
            evidence=", ".join(other.name for other in others),
            do="pass the path of the one to use",
        )
    return others[0] if others else None


def _files_of_index(index: Path) -> dict[Path, set[str] | None]:
    """Return the files that an index names, and the tensors to take from each."""
    try:
        weight_map: dict[str, str] = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        wanted: dict[Path, set[str] | None] = {}
        for name, file in weight_map.items():
            if Path(file).name != file:
                raise CheckpointError(
                    f"{index} names a file outside its folder: {file!r}.", do="put all files into one folder"
                )
            names = wanted.setdefault(index.parent / file, set())
            if names is not None:
                names.add(name)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{index} is not an index of safetensors files: {error!r}",
            do="download it again, or remove it: the files of the folder are then read without it",
        ) from error
    return wanted


def _opened(path: Path, wanted: Mapping[Path, set[str] | None]) -> TensorFiles:
    """Open files and collect the names in them; ``None`` selects all of a file."""
    opened: dict[Path, Any] = {}
    file_of: dict[str, Path] = {}
    with ExitStack() as until_complete:
        for file, names in wanted.items():
            opened[file] = until_complete.enter_context(_open(file))
            there = set(opened[file].keys())
            if names is not None and names - there:
                raise CheckpointError(
                    f"{file} lacks {len(names - there)} tensors that the index says it holds.",
                    evidence=_some(sorted(names - there)),
                    do="download the files again, all of the same version",
                )
            for name in sorted(there if names is None else names):
                if name in file_of:
                    raise CheckpointError(
                        f"Two files contain {name!r}.",
                        evidence=f"{file_of[name]}\n{file}",
                        do=f"keep one of them in {path}, or pass the path of the file to use",
                    )
                file_of[name] = file
        files = TensorFiles(path, opened, file_of)
        until_complete.pop_all()
    return files


def _open(file: Path) -> Any:
    with _damage_reported(file):
        return cast("Any", safetensors).safe_open(file, framework="pt")


def _info_of(name: str, file: Path, opened: Any) -> TensorInfo:
    kind = opened.get_slice(name)
    code = str(kind.get_dtype())
    dtype = _DTYPES.get(code)
    if dtype is None:
        raise CheckpointError(
            f"{file} holds {name!r} in a format for which this PyTorch has no dtype: {code}.",
            do="save the weights in float32, bfloat16 or float16",
        )
    return TensorInfo(dtype, tuple(int(size) for size in kind.get_shape()), file)


def _some(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f", ... ({len(names) - most} more)" if len(names) > most else "")


@contextmanager
def _damage_reported(file: Path) -> Generator[None]:
    try:
        yield
    except (safetensors.SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} cannot be read: {error}", do="download or save it again; only the safetensors format is read"
        ) from error
