# SPDX-License-Identifier: Apache-2.0
"""Checksums of the shared state of replicas: the bits of tensors, and the hyperparameters of optimizers.

For tensors: a few operations for many small ones, one pass over memory; of all tensors of a model at once, and of each
once they differ; and whether values are the same up to rounding, once their bits differ. Sends nothing.
"""

from __future__ import annotations

import marshal
import math
import struct
import zlib
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import torch

from rankwise.world.device.streams import Later

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.optim.optimizer import Optimizer


WORD_BYTES = 8
NUM_COLUMNS = 251
"""Words are summed per column, and columns are weighted. A prime: swapped rows of a table then change columns."""
COPIED_TOGETHER_BYTES = 2**16
"""Up to this size a tensor is copied together with others: a call per tensor would take longer."""
PIECE_BYTES = 2**22
"""How much is copied together at a time."""
SHORT_BITS = 0xFFFFF
"""Few enough that sums of squares are exact in float64 for thousands of ranks."""
_AS_THEY_ARE = {bool, int, float, str, type(None)}
NOT_COMPARED = {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}
"""Keys of a parameter group that do not affect what a step computes."""


class ChecksumOfAll:
    """One checksum of many tensors, taken repeatedly while their values change."""

    def __init__(self) -> None:
        self._places: list[tuple[int, torch.Size, torch.dtype]] = []
        self._pieces: list[list[torch.Tensor]] = []
        self._late: Callable[[], int] | None = None

    @property
    def is_late(self) -> bool:
        """Whether :meth:`now_or_next` has a checksum that it has not returned yet."""
        return self._late is not None

    def now_or_next(self, tensors: Sequence[torch.Tensor]) -> int | None:
        """Return the checksum of tensors; of those on devices ``None``, and in the next call that of this one.

        So the host does not wait for a device.
        """
        late, self._late = self._late, None
        if late is not None:
            return late()
        if all(tensor.device.type == "cpu" for tensor in tensors):
            return self(tensors)
        self._late = self.start(tensors)
        return None

    @torch.no_grad()
    def __call__(self, tensors: Sequence[torch.Tensor]) -> int:
        """Return the checksum of plain tensors, in the same order each time. Waits for their device."""
        return combined(_read(self._sums(tensors)))

    @torch.no_grad()
    def start(self, tensors: Sequence[torch.Tensor]) -> Callable[[], int]:
        """Start computing a checksum of tensors on devices, in the same order each time; return what returns it."""
        sums = self._sums(tensors)
        devices = dict.fromkeys(one.device for one in sums)
        copies = [Later(torch.stack([one for one in sums if one.device == device])) for device in devices]
        return lambda: combined([number for copy in copies for number in copy.read().tolist()])

    def _sums(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        places = [(tensor.data_ptr(), tensor.shape, tensor.dtype) for tensor in tensors]
        if places != self._places or not all(tensor.is_contiguous() for tensor in tensors):
            # The previous flat views refer to other memory now.
            self._pieces = _pieces([tensor.detach().reshape(-1) for tensor in tensors])
            self._places = places
        return [_sum_of_bits(piece[0] if len(piece) == 1 else torch.cat(piece)) for piece in self._pieces]


@torch.no_grad()
def checksums_of_each(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return a checksum per tensor. Waits for the device that they are on."""
    return _read([_sum_of_bits(tensor.detach().reshape(-1)) for tensor in tensors])


def combined(numbers: Sequence[int]) -> int:
    """Return one number of 32 bits for several of up to 64."""
    return zlib.crc32(struct.pack(f"={len(numbers)}q", *numbers))


def short(checksum: int) -> int:
    """Return a part of a checksum that is small enough for :func:`are_equal`."""
    return checksum & SHORT_BITS


def are_equal(num_ranks: int, sum_of_values: float, sum_of_squares: float) -> bool:
    """Return whether short checksums are the same on all ranks, by their sum and the sum of their squares."""
    return abs(num_ranks * sum_of_squares - sum_of_values**2) <= 1e-9 * max(sum_of_values**2, 1e-300)


def _pieces(flats: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return tensors in lists, each of one dtype and device and up to a size; a list may be a single tensor."""
    closed: list[list[torch.Tensor]] = []
    open_of: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for flat in flats:
        if flat.nbytes > COPIED_TOGETHER_BYTES:
            closed.append([flat])
            continue
        piece = open_of.setdefault((flat.dtype, flat.device), [])
        piece.append(flat)
        if sum(one.nbytes for one in piece) > PIECE_BYTES:
            closed.append(open_of.pop((flat.dtype, flat.device)))
    return closed + list(open_of.values())


def _sum_of_bits(flat: torch.Tensor) -> torch.Tensor:
    """Return a number of 64 bits, on the device of a tensor of one dimension."""
    if flat.storage_offset() * flat.itemsize % WORD_BYTES:
        flat = flat.clone()
    per_word = max(WORD_BYTES // flat.itemsize, 1)
    num_even = flat.numel() // per_word * per_word
    words, rest = flat[:num_even].view(torch.int64), flat[num_even:].view(torch.uint8)
    weights = _weights(flat.device)
    num_rows = words.numel() // NUM_COLUMNS
    last = words[num_rows * NUM_COLUMNS :]
    # Not torch.dot(), which accelerators do not support for integers.
    total = (last * weights[: last.numel()]).sum()
    if num_rows:
        # Sums of integers are the same in any order, and wrap around.
        total = total + (words[: num_rows * NUM_COLUMNS].view(num_rows, NUM_COLUMNS).sum(0) * weights).sum()
    if rest.numel():
        total = total + (rest.long() * weights[: rest.numel()]).sum()
    return total


@cache
def _weights(device: torch.device) -> torch.Tensor:
    # Odd: multiplying by an odd number loses no bit.
    numbers = [(0x9E3779B97F4A7C15 * (2 * column + 1)) % 2**63 | 1 for column in range(NUM_COLUMNS)]
    weights = torch.tensor(numbers, dtype=torch.int64, device=device)
    if type(weights) is not torch.Tensor:
        # Not kept for calls outside torch's FakeTensorMode.
        message = "tensors have no values here"
        raise RuntimeError(message)
    return weights


def _read(sums: Sequence[torch.Tensor]) -> list[int]:
    """Return the numbers, waiting once per device."""
    of_device: dict[torch.device, list[int]] = {}
    for index, one in enumerate(sums):
        of_device.setdefault(one.device, []).append(index)
    found = [0] * len(sums)
    for indices in of_device.values():
        for index, number in zip(indices, torch.stack([sums[index] for index in indices]).tolist(), strict=True):
            found[index] = number
    return found


def settings_checksum(optimizer: Optimizer) -> int:
    """Return a checksum of all hyperparameters. Waits for no device: tensors on accelerators are left out."""
    return zlib.crc32(settings_bytes(optimizer))


def settings_bytes(optimizer: Optimizer) -> bytes:
    """Return the hyperparameters of each group as bytes that are the same in every process.

    Waits for no device: tensors on accelerators are left out.
    """
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        # Not a comprehension: this runs in every step, and a comprehension costs a call.
        compared = group.copy()
        for key in NOT_COMPARED:
            compared.pop(key, None)
        groups.append(compared)
    try:
        # Version 2: later ones depend on other references to a value.
        return marshal.dumps(groups, 2)
    except ValueError:  # a tensor among them
        return marshal.dumps([_all_plain(group, waits=False) for group in groups], 2)


@lru_cache(16)
def settings_in(held: bytes) -> list[dict[str, Any]]:
    """Return the hyperparameters of each group from :func:`settings_bytes`, in JSON-able form, not to be changed."""
    return [_all_plain(group, waits=False) for group in marshal.loads(held)]  # noqa: S302 - this process wrote it


def settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters of a parameter group in JSON-able form."""
    return _all_plain({key: value for key, value in group.items() if key not in NOT_COMPARED}, waits=True)


def is_same_setting(one: object, other: object) -> bool:
    """Return whether two values of a hyperparameter are the same: also if both are NaN."""
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one):
        return math.isnan(other)
    return one == other


def _all_plain(group: dict[str, Any], *, waits: bool) -> dict[str, Any]:
    """Return hyperparameters in JSON-able form, as :func:`_plain`."""
    return {key: held if type(held) in _AS_THEY_ARE else _plain(held, waits=waits) for key, held in group.items()}


def _plain(value: object, *, waits: bool) -> Any:
    """Return a hyperparameter in JSON-able form; read one on an accelerator only if it ``waits`` for the device."""
    if isinstance(value, torch.Tensor):
        is_read = value.numel() == 1 and not value.is_meta and (waits or value.device.type == "cpu")
        return value.item() if is_read else None
    if isinstance(value, list | tuple):
        return [one if type(one) in _AS_THEY_ARE else _plain(one, waits=waits) for one in value]
    return value if value is None or isinstance(value, bool | int | float | str) else type(value).__name__


# -- the same up to rounding, which differs between kinds of processors ----------------------------

ROUNDING_TOLERANCE = {"float64": 1e-8, "float32": 1e-4, "complex128": 1e-8, "complex64": 1e-4}
"""How much two ranks' values may differ by rounding after many steps, relative to the tensor's largest element."""
NARROW_TOLERANCE = 2e-2
"""The same for floating-point numbers of 16 bits or fewer."""
FLOOR = 1e-3
"""Lower bound of a tensor's largest element, relative to the model's: near zero, earlier rounding remains."""
_CHUNK_ELEMENTS = NUM_COLUMNS * 2**14


def tolerance(dtype: torch.dtype) -> float:
    """Return how much a value of ``dtype`` may differ, relative to its largest element; 0 for integers."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    return ROUNDING_TOLERANCE.get(str(dtype).removeprefix("torch."), NARROW_TOLERANCE)


@torch.no_grad()
def summary_of(tensor: torch.Tensor) -> tuple[float, float]:
    """Return two numbers by which ranks compare a tensor without sending it: a projection, and its norm.

    Values that differ at random by a fraction of the norm have projections that differ by about that fraction.
    """
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = plain.detach().reshape(-1)
    weights = _signed_weights(flat.device)
    projection, square = 0.0, 0.0
    for start in range(0, flat.numel(), _CHUNK_ELEMENTS):
        wide = flat[start : start + _CHUNK_ELEMENTS].double()
        rows = wide.numel() // NUM_COLUMNS * NUM_COLUMNS
        columns = wide[:rows].view(-1, NUM_COLUMNS).sum(0) * weights
        last = wide[rows:] * weights[: wide.numel() - rows]
        projection += float(columns.sum() + last.sum())
        square += float(wide.square().sum())
    return projection, square**0.5


def is_rounding(one: tuple[float, float], other: tuple[float, float], part: float) -> bool:
    """Return whether two summaries differ by at most ``part`` of the norm. NaN on both sides is the same."""
    if one == other or str(one) == str(other):
        return True
    return abs(one[0] - other[0]) <= part * max(one[1], other[1])


@cache
def _signed_weights(device: torch.device) -> torch.Tensor:
    # Of both signs, and all different: the sum of a bias before softmax never changes, but its projection does.
    return torch.cos(torch.arange(1, NUM_COLUMNS + 1, dtype=torch.float64)).to(device)
