# SPDX-License-Identifier: Apache-2.0
"""What ranks compare of their inputs where they must be given the same. Used by pipeline and tensor_parallel."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import torch

from rankwise.exchange.bytes_of import bytes_of
from rankwise.torch_private import tree as pytree

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

CHECKED_STEPS = 3
"""How many of the first steps compare values too; shapes are compared in all."""


def digest_of(values: object) -> int:
    """Return a checksum of the tensors of a tree."""
    digest = 0
    for leaf in pytree.tree_leaves(values):
        if isinstance(leaf, torch.Tensor) and not leaf.is_meta:
            plain = leaf.detach().to("cpu").contiguous()
            digest = zlib.crc32(bytes_of(plain).numpy().tobytes(), zlib.crc32(str(plain.shape).encode(), digest))
    return digest


def in_words(args: Sequence[object], kwargs: Mapping[str, object]) -> str:
    """Return the arguments of a call by dtypes and shapes, as ``float32[8, 3], mask=bool[8]``."""
    return ", ".join([*map(_words, args), *(f"{name}={_words(value)}" for name, value in kwargs.items())])


def _words(value: object) -> str:
    leaves = pytree.tree_leaves(value)
    words = [
        f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}" if isinstance(leaf, torch.Tensor) else repr(leaf)
        for leaf in leaves
    ]
    return words[0] if len(words) == 1 else "(" + ", ".join(words) + ")"
