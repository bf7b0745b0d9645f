# SPDX-License-Identifier: Apache-2.0
"""Moving the weights of a model to their homes, from memory or from files: all of them, or none.

First everything is checked, then every new tensor is created and filled, and only then are they given to the model.
Imported by place.
"""

from __future__ import annotations

import copy
import errno
import importlib
import json
import logging
import os
import shutil
import struct
import warnings
import weakref
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rankwise.errors import CheckpointError, ConfigurationError, bytes_text
from rankwise.replicate.blocks import near
from rankwise.tensors.files import CODES, SUFFIX
from rankwise.torch_private.modules import forget_flat_weights, own_buffers, replace_buffers, update_flat_weights
from rankwise.torch_private.tensors import TREE_LOGGER, can_take_data
from rankwise.world.processes import make_temporary_folder, remove_temporary_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from rankwise.place.units import Slot, Unit
    from rankwise.tensors.files import TensorFiles

ALIGNMENT_BYTES = 64
"""Alignment of the first tensor of a file, enough for every dtype."""


class OffloadFiles:
    """A new folder within ``parent``, with one file per part of a model. Removed with the object, or at exit.

    Creates ``parent`` if needed; several processes may share it.

    Raises:
        ConfigurationError: the folder is not writable.
    """

    def __init__(self, parent: str | os.PathLike[str]) -> None:
        try:
            Path(parent).mkdir(parents=True, exist_ok=True)
            self.folder = make_temporary_folder("place", Path(parent))
        except OSError as error:
            raise ConfigurationError(
                f"Cannot store weights in {parent}: {error.strerror}.", do="pass offload_folder= a writable folder"
            ) from error
        self._num_files = 0
        self._remove = weakref.finalize(self, _remove, self.folder, os.getpid())

    def tensors(self, kinds: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> dict[str, torch.Tensor]:
        """Return zeros in one new file, all of its space allocated, for a dtype and shape by name.

        Raises:
            ConfigurationError: the disk has no room, or the format does not have a dtype.
        """
        for name, (dtype, _) in kinds.items():
            if dtype not in CODES:
                raise ConfigurationError(
                    f"{name} cannot be stored on disk: safetensors does not support {dtype}.",
                    do="assign it to another device",
                )
        # Widest first, without gaps, so that each tensor is aligned for its dtype.
        names = sorted(kinds, key=lambda name: (-kinds[name][0].itemsize, name))
        header: dict[str, object] = {}
        end = 0
        for name in names:
            dtype, shape = kinds[name]
            begin, end = end, end + torch.Size(shape).numel() * dtype.itemsize
            header[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        start = -(-(8 + len(text)) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        path = self.folder / f"{self._num_files:05d}{SUFFIX}"
        self._num_files += 1
        self._allocate(path, struct.pack("<Q", start - 8) + text.ljust(start - 8), start + end)
        if end == 0:
            return {name: torch.empty(kinds[name][1], dtype=kinds[name][0]) for name in names}
        memory = torch.UntypedStorage.from_file(str(path), shared=True, nbytes=start + end)
        tensors: dict[str, torch.Tensor] = {}
        for name in names:
            dtype, shape = kinds[name]
            view = torch.empty(0, dtype=dtype)
            tensors[name] = view.set_(memory, start // dtype.itemsize, shape)  # type: ignore[arg-type]
            start += tensors[name].nbytes
        return tensors

    def _allocate(self, path: Path, head: bytes, size_bytes: int) -> None:
        """Write the head and allocate the rest: writing to a mapping of a full disk would kill the process."""
        try:
            with path.open("xb") as file:
                file.write(head)
                file.flush()
                os.posix_fallocate(file.fileno(), 0, size_bytes)
        except OSError as error:
            if error.errno not in {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}:
                raise
            raise ConfigurationError(
                f"{self.folder.parent} has no room for {bytes_text(size_bytes)} of weights: {error.strerror}.",
                evidence=f"free there: {bytes_text(shutil.disk_usage(self.folder).free)}",
                do="pass offload_folder= on a larger disk, or increase the budgets of other devices",
            ) from error

    def remove(self) -> None:
        """Remove the files. Mapped tensors stay usable."""
        self._remove()


def _remove(folder: Path, owner: int) -> None:
    # A process forked while the model existed does not own its files.
    if os.getpid() == owner:
        remove_temporary_folder(folder)


MOST_LISTED = 8
"""An error lists so many names."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class WeightSource:
    """The values of a model's tensors: its own, or those in files.

    Args:
        model: may be on the meta device, or in part.
        slots: of all tensors that must have values.
        checkpoint: files with its weights, or ``None`` to use its own.

    Raises:
        CheckpointError: names, shapes or dtypes in the files are not those of the model.
        ConfigurationError: a tensor on the meta device has no values anywhere.
    """

    def __init__(self, model: nn.Module, slots: Sequence[Slot], checkpoint: TensorFiles | None) -> None:
        self._checkpoint = checkpoint
        self._key_of: dict[int, str] = {}
        if checkpoint is not None:
            # Held, since an id is valid only while its object exists.
            self._state: dict[str, Any] = model.state_dict(keep_vars=True)
            self._key_of = _matched(self._state, checkpoint, type(model).__name__)
        self._rebuilt: dict[int, torch.Tensor] = {}
        empty = [slot for slot in slots if slot.tensor.is_meta and id(slot.tensor) not in self._key_of]
        if any(slot.is_parameter for slot in empty):
            raise ConfigurationError(
                f"{sum(slot.is_parameter for slot in empty)} parameters are on the meta device, without values.",
                evidence=in_short([slot.name for slot in empty if slot.is_parameter]),
                do='pass checkpoint="model.safetensors", or create the model on the CPU',
            )
        for module in {id(slot.module): slot.module for slot in empty}.values():
            mine = [slot for slot in empty if slot.module is module]
            self._rebuilt |= _rebuilt(model, module, mine)

    def is_new(self, tensor: torch.Tensor) -> bool:
        """Return whether the values differ from those the model holds now."""
        return id(tensor) in self._key_of or id(tensor) in self._rebuilt

    def fill(self, tensor: torch.Tensor, destination: torch.Tensor) -> None:
        """Copy the values of a tensor of the model into ``destination``, converted to its dtype."""
        if self._checkpoint is not None and id(tensor) in self._key_of:
            self._checkpoint.read_into(self._key_of[id(tensor)], destination)
        else:
            with torch.no_grad():
                destination.copy_(self._rebuilt.get(id(tensor), tensor))


@dataclass(frozen=True, slots=True)
class TensorDevices:
    """The devices that the tensors of a model go to."""

    of_parameter: dict[int, str]
    """The home of each parameter, by ``id``."""
    runs_on: dict[Unit, torch.device]
    """The device of each part, and of its buffers."""
    to_int8: set[int]
    """Weights that become 8 bits, by ``id``."""

    def of(self, unit: Unit, slot: Slot) -> str:
        """Return the home of one tensor."""
        return self.of_parameter[id(slot.tensor)] if slot.is_parameter else str(self.runs_on[unit])


def prepare(
    units: Sequence[Unit], homes: TensorDevices, weights: WeightSource, files: OffloadFiles | None
) -> dict[int, torch.Tensor]:
    """Return the new tensors, by the ``id`` of those they replace. The model does not change.

    Raises:
        ConfigurationError: the disk is full.
    """
    new: dict[int, torch.Tensor] = {}
    for unit in units:
        on_disk: dict[str, torch.Tensor] = {}
        for slot in unit.slots:
            tensor = slot.tensor
            if id(tensor) in new or any(tensor is other for other in on_disk.values()):
                continue
            home = homes.of(unit, slot)
            if home == "disk" and id(tensor) not in homes.to_int8:
                on_disk[slot.name] = tensor
            elif id(tensor) in homes.to_int8:
                new[id(tensor)] = _in_int8(slot, home, weights, files)
            elif weights.is_new(tensor) or tensor.device != torch.device(home):
                new[id(tensor)] = _empty_like(tensor, home)
                weights.fill(tensor, new[id(tensor)])
        if on_disk and files is not None:
            mapped = files.tensors({name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in on_disk.items()})
            for name, tensor in on_disk.items():
                weights.fill(tensor, mapped[name])
                new[id(tensor)] = mapped[name]
    return new


def _empty_like(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """Return memory for a tensor. For one on meta, torch.empty_like imports 480 modules."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def _in_int8(slot: Slot, home: str, weights: WeightSource, files: OffloadFiles | None) -> torch.Tensor:
    full = _empty_like(slot.tensor, "cpu" if home == "disk" else home)
    weights.fill(slot.tensor, full)
    small = quantised(full)
    if home != "disk" or files is None:
        return small
    parts = parts_of(small)
    kinds = {f"{slot.name}.{name}": (part.dtype, tuple(part.shape)) for name, part in parts.items()}
    mapped = files.tensors(kinds)
    for name, part in parts.items():
        mapped[f"{slot.name}.{name}"].copy_(part)
    return with_parts(small, {name: mapped[f"{slot.name}.{name}"] for name in parts})


def commit(units: Sequence[Unit], new: dict[int, torch.Tensor], to_int8: set[int]) -> None:
    """Give the model its new tensors, all or none. Parameters stay the same objects, except those in 8 bits.

    Raises:
        ConfigurationError: another object refers to a parameter, so that its content cannot be replaced.
    """
    slots_of: dict[int, list[Slot]] = {}
    old_of: dict[int, torch.Tensor] = {}
    recurrent: set[nn.RNNBase] = set()
    for unit in units:
        for slot in unit.slots:
            # Held until the end: an id is valid only while its object exists.
            old_of[id(slot.tensor)] = slot.tensor
            slots_of.setdefault(id(slot.tensor), []).append(slot)
            if isinstance(slot.module, nn.RNNBase):
                recurrent.add(slot.module)
    for module in recurrent:
        # Its weak references would keep torch from replacing the content of a parameter.
        forget_flat_weights(module)
    with ExitStack() as on_error, ExitStack() as always:
        for module in recurrent:
            always.callback(update_flat_weights, module)
        for key, tensor in new.items():
            on_error.callback(_replace(old_of[key], tensor, slots_of[key], in_int8=key in to_int8))
        on_error.pop_all()


def _replace(old: torch.Tensor, tensor: torch.Tensor, slots: list[Slot], *, in_int8: bool) -> Callable[[], object]:
    """Give a parameter or a buffer its new content, and return a function that undoes it."""
    if not in_int8 and can_take_data(old, tensor):
        before, old.data = old.data, tensor
        return lambda: setattr(old, "data", before)
    if not in_int8 and isinstance(old, nn.Parameter):
        filled = nn.Parameter(tensor, requires_grad=old.requires_grad)
        vars(filled).update(vars(old))  # type: ignore[attr-defined]
        try:
            torch.utils.swap_tensors(old, filled)
        except RuntimeError as error:
            raise ConfigurationError(
                f"{slots[0].name} cannot be initialized: another object still refers to it on the meta device.",
                evidence=str(error),
                do="call place() before running the model and before other objects refer to its parameters, or "
                "delete those objects (an output, a loss); nothing was changed",
            ) from error
        return lambda: torch.utils.swap_tensors(old, filled)
    put = nn.Parameter(tensor, requires_grad=False) if in_int8 else tensor
    for slot in slots:
        slot.put(put)
    return lambda: [slot.put(old) for slot in slots]


def _matched(state: dict[str, Any], checkpoint: TensorFiles, model: str) -> dict[int, str]:
    """Return the name in the files of each tensor of the model, by ``id``."""
    wanted = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    keys_of: dict[int, list[str]] = {}
    for key, tensor in wanted.items():
        keys_of.setdefault(id(tensor), []).append(key)
    there = checkpoint.entries
    missing = [keys[0] for keys in keys_of.values() if not any(key in there for key in keys)]
    unexpected = sorted(set(there) - set(wanted))
    lines = [
        f"missing: {key} ({near(key, unexpected)})" if unexpected else f"missing: {key}"
        for key in missing[:MOST_LISTED]
    ]
    lines += [f"missing: {len(missing) - MOST_LISTED} more"] if len(missing) > MOST_LISTED else []
    lines += [f"unexpected: {in_short(unexpected)}"] if unexpected else []
    for key in wanted.keys() & there.keys():
        entry, tensor = there[key], wanted[key]
        if entry.shape != tuple(tensor.shape):
            lines.append(f"{key}: {list(entry.shape)} in the file, {list(tensor.shape)} in the model")
        elif not entry.fits(tensor):
            lines.append(f"{key}: {entry.dtype} in the file, {tensor.dtype} in the model")
    there_of = {number: [key for key in keys if key in there] for number, keys in keys_of.items()}
    lines += [
        f"{' and '.join(keys)} differ in the file, and are one tensor in the model"
        for keys in there_of.values()
        if len(keys) > 1 and not lines and not checkpoint.are_equal(keys)
    ]
    if lines:
        raise CheckpointError(
            f"{checkpoint.path} does not contain the weights of this {model}.",
            evidence="\n".join(lines),
            do="pass the file of this model, or create the model that the file belongs to; nothing was changed",
        )
    return {number: keys[0] for number, keys in there_of.items()}


def _rebuilt(model: nn.Module, module: nn.Module, slots: list[Slot]) -> dict[int, torch.Tensor]:
    """Compute buffers on the meta device that no file holds, with ``_init_weights`` of the model.

    Transformers models have it, for example for the frequencies of rotary embeddings. It is run twice on a copy of the
    module, on memory of zeros and of ones: buffers that it did not write differ.
    """
    results: list[dict[str, torch.Tensor]] = []
    for value in (0, 1):
        trial = copy.copy(module)
        filled = {
            name: None if buffer is None else torch.full_like(buffer, value, device="cpu")
            for name, buffer in own_buffers(module).items()
        }
        replace_buffers(trial, filled)
        for owner in [one for one in model.modules() if module in set(one.modules())][::-1]:
            initialise = getattr(owner, "_init_weights", None)
            if callable(initialise) and not list(module.parameters(recurse=False)):
                with torch.no_grad():
                    initialise(trial)
                break
        results.append(dict(trial.named_buffers(recurse=False, remove_duplicate=False)))
    first, second = results
    unwritten = [slot.name for slot in slots if not torch.equal(first[slot.attribute], second[slot.attribute])]
    if unwritten:
        name = unwritten[0].rpartition(".")[0]
        raise ConfigurationError(
            "Buffers on the meta device have no values, and checkpoints do not contain them.",
            evidence=in_short(unwritten),
            do=f"create that module on the CPU before place(): model.{name or 'module'} = "
            f"{type(module).__name__}(...), outside `with torch.device('meta')`",
        )
    return {id(slot.tensor): first[slot.attribute] for slot in slots}


def in_short(names: list[str]) -> str:
    """Return the first names of a list, as a line for an error."""
    more = len(names) - MOST_LISTED
    return ", ".join(names[:MOST_LISTED]) + (f", ... ({more} more)" if more > 0 else "")


# -- weights of linear layers in 8 bits, for inference, by torchao --


def quantisable(model: nn.Module) -> set[int]:
    """Return the ``id`` of each weight that becomes 8 bits: weights of linear layers only.

    Raises:
        ConfigurationError: torchao is not installed, or does not support the dtype of the model.
    """
    _torchao()
    linear = [module for module in model.modules() if type(module) is nn.Linear]
    wrong = {module.weight.dtype for module in linear} - set(_DTYPES)
    if wrong:
        raise ConfigurationError(
            f"int8=True requires a model in float32, bfloat16 or float16, not {', '.join(map(str, wrong))}.",
            do="convert the model first: model.bfloat16()",
        )
    others = {
        id(tensor)
        for module in model.modules()
        for name, tensor in module.named_parameters(recurse=False)
        if not (type(module) is nn.Linear and name == "weight")
    }
    return {id(module.weight) for module in linear} - others


def bytes_of_quantised(weight: torch.Tensor) -> int:
    """Return the memory of a weight [out, in] in 8 bits, with a scale and a zero point per row."""
    return weight.numel() + weight.shape[0] * (weight.element_size() + 1)


def quantised(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight [out, in] in 8 bits, which a linear layer can use.

    Source: torchao.quantization.quantize_ with Int8WeightOnlyConfig: symmetric, one scale per row.
    """
    torchao = _torchao()
    layer = nn.Linear(1, 1, bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    with _quiet():
        torchao.quantize_(layer, torchao.Int8WeightOnlyConfig())
    return layer.weight.detach()


def parts_of(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the plain tensors that a weight in 8 bits consists of."""
    names, _ = weight.__tensor_flatten__()  # type: ignore[attr-defined]
    return {name: getattr(weight, name) for name in names}


def with_parts(weight: torch.Tensor, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the same weight with other tensors as its parts."""
    _, rest = weight.__tensor_flatten__()  # type: ignore[attr-defined]
    made: torch.Tensor = type(weight).__tensor_unflatten__(parts, rest, weight.shape, weight.stride())  # type: ignore[attr-defined]
    return made


def _torchao() -> Any:
    try:
        with _quiet():
            return importlib.import_module("torchao.quantization")
    except ImportError as error:
        raise ConfigurationError(
            "int8=True needs torchao, which is not installed.", do="pip install 'rankwise[int8]'"
        ) from error


@contextmanager
def _quiet() -> Generator[None]:
    """Silence the messages of torchao's import about kernels of other machines."""
    loggers = [logging.getLogger(name) for name in ("torchao", TREE_LOGGER)]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
