# SPDX-License-Identifier: Apache-2.0
"""Seeds per sample: augmentation is the same on any rank, in any worker, after a resume.

Sets the process-wide generators of Python, NumPy and torch, and restores them; holds no state of its own.
"""

from __future__ import annotations

import hashlib
import random
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from rankwise.comm.session import current_or_none

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)

_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)

GeneratorState = tuple[Any, Any, torch.Tensor]
"""States of Python's, NumPy's and torch's CPU generator."""


def epoch_seed(seed: int, epoch: int) -> int:
    """Return the 64-bit seed of an epoch. ``seed`` and ``epoch`` are any integers."""
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8, person=b"rankwise.seeds").digest()
    return int.from_bytes(digest, "little")


def sample_seeds(seed: int, epoch: int, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
    """Return the seed of each sample of ``indices`` in ``epoch``.

    A pure function of ``(seed, epoch, index)``: independent of rank, worker and batch. 32 bits are the widest seed that
    NumPy's and MONAI's generators take.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014), SplitMix64: its
        output at step ``index`` of the stream begun at ``epoch_seed``.
    """
    state = (indices.astype(np.uint64) + np.uint64(1)) * _STEP + np.uint64(epoch_seed(seed, epoch))
    state = (state ^ (state >> np.uint64(30))) * _MULTIPLIER_1
    state = (state ^ (state >> np.uint64(27))) * _MULTIPLIER_2
    return (state ^ (state >> np.uint64(31))).astype(np.uint32)


def seed_generators(seed: int, owners: Iterable[Any] = ()) -> None:
    """Set Python's, NumPy's legacy and torch's CPU generator to a seed of 32 bits, and those of ``owners``.

    Owners are generators, or have generators of their own and ``set_random_state(seed=)``, as MONAI's random transforms
    do.
    """
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - the generator users' datasets draw from
    torch.default_generator.manual_seed(seed)
    for owner in owners:
        _seed_owner(owner, seed)


def _seed_owner(owner: Any, seed: int) -> None:
    if isinstance(owner, torch.Generator):
        owner.manual_seed(seed)
    elif isinstance(owner, np.random.Generator):
        owner.bit_generator.state = type(owner.bit_generator)(seed).state
    elif isinstance(owner, random.Random | np.random.RandomState):
        owner.seed(seed)
    else:
        owner.set_random_state(seed=seed)


def generator_state() -> GeneratorState:
    """Return the states of the three process-wide CPU generators."""
    numpy_state = np.random.get_state()  # noqa: NPY002 - as in seed_generators
    return random.getstate(), numpy_state, torch.default_generator.get_state()


def set_generator_state(state: GeneratorState) -> None:
    """Set the three process-wide CPU generators to what :func:`generator_state` returned."""
    random.setstate(state[0])
    np.random.set_state(state[1])  # noqa: NPY002 - as in seed_generators
    torch.default_generator.set_state(state[2])


@contextmanager
def generators_kept() -> Generator[None]:
    """Restore the process-wide generators after the block, whatever it draws or sets."""
    state = generator_state()
    try:
        yield
    finally:
        set_generator_state(state)


@contextmanager
def reading(what: Literal["samples", "batches"]) -> Generator[None]:
    """Note in the session that draws inside the block are seeded by sample, or by a rank's part of a batch."""
    session = current_or_none()
    if session is None:
        yield
        return
    before = session.batches.set_reading(what)
    try:
        yield
    finally:
        session.batches.set_reading(before)


def owners_of_generators(dataset: object) -> list[Any]:
    """Return the objects with ``set_random_state`` in ``dataset`` and its parts, and generators that are attributes.

    Follows ``transform`` (MONAI, torchvision), ``dataset`` (``Subset``) and ``datasets`` (``ConcatDataset``). MONAI's
    ``Compose`` passes the seed on to its transforms.
    """
    owners: list[Any] = []
    seen: set[int] = set()
    waiting: list[object] = [dataset]
    while waiting:
        candidate = waiting.pop()
        if candidate is None or id(candidate) in seen:
            continue
        seen.add(id(candidate))
        if callable(getattr(candidate, "set_random_state", None)):
            owners.append(candidate)
        else:
            owners += _generators_of(candidate, seen)
        waiting.extend(getattr(candidate, name, None) for name in ("transform", "dataset"))
        inner = getattr(candidate, "datasets", ())
        waiting.extend(inner if isinstance(inner, list | tuple) else ())
    return owners


def _generators_of(candidate: object, seen: set[int]) -> list[Any]:
    found = [one for one in getattr(candidate, "__dict__", {}).values() if isinstance(one, _GENERATORS)]
    new = {id(one): one for one in found if id(one) not in seen}
    seen.update(new)
    return list(new.values())
