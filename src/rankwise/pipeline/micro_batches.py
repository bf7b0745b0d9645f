# SPDX-License-Identifier: Apache-2.0
"""A batch as parts of nearly equal size. Pure. Used by pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from rankwise.errors import ConfigurationError
from rankwise.torch_private.tensors import tree_flatten, tree_leaves, tree_unflatten

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def arguments(x: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return ``(args, kwargs)`` to call the model with: a tuple or list is several, a dict is by name."""
    if isinstance(x, dict):
        # In one order, so that ranks need not agree on theirs.
        named = cast("dict[str, Any]", x)
        return (), {name: named[name] for name in sorted(named, key=str)}
    if isinstance(x, list | tuple) and not hasattr(x, "_fields"):
        return tuple(cast("tuple[Any, ...]", x)), {}
    return (x,), {}


def num_samples(value: object, what: str) -> int:
    """Return the first dimension of the tensors of a tree.

    Raises:
        ConfigurationError: they differ, or there is none.
    """
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.ndim]
    sizes = sorted({tensor.shape[0] for tensor in tensors})
    if len(sizes) != 1:
        raise ConfigurationError(
            f"{what} does not have one number of samples.",
            evidence="first dimensions: " + (", ".join(map(str, sizes)) if sizes else "no tensor has rows"),
            do="pass tensors whose first dimension is the batch",
        )
    return sizes[0]


def sizes_of(total: int, count: int) -> list[int]:
    """Return ``count`` sizes that sum to ``total``, as equal as possible, the first ones larger."""
    least, larger = divmod(total, count)
    return [least + (index < larger) for index in range(count)]


def split(value: object, sizes: Sequence[int]) -> list[list[Any]]:
    """Return per part the leaves of a tree; tensors are split along dimension 0, other leaves repeated."""
    columns: list[Sequence[Any]] = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor) and leaf.ndim:
            columns.append(leaf.split(list(sizes)))
        else:
            columns.append([leaf] * len(sizes))
    return [[column[index] for column in columns] for index in range(len(sizes))]


def rows_like(tensor: torch.Tensor, num: int) -> torch.Tensor:
    """Return a tensor of zeros for another number of samples."""
    return tensor.new_zeros((num, *tensor.shape[1:])) if tensor.dim() else tensor


def check_rows(shapes: Iterable[tuple[int, ...]], size: int) -> None:
    """Raise a ConfigurationError unless tensors of these shapes have a row for each of ``size`` samples."""
    for shape in shapes:
        if shape[:1] != (size,):
            raise ConfigurationError(
                "The model's output has a tensor without a row per sample.",
                evidence=f"{list(shape)} for a micro-batch of {size} samples",
                do="return values per sample from the model",
            )


def first_part(example: object, num_micro_batches: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the first micro-batch of an example, as the model is called with it.

    Raises:
        ConfigurationError: the example has no samples, or no one number of them.
    """
    x = arguments(example)
    samples = num_samples(x, "example")
    if samples == 0:
        raise ConfigurationError("The example has no samples.", do="pass a batch like those used in training")
    sizes = sizes_of(samples, min(num_micro_batches, samples))
    return tree_unflatten(split(x, sizes)[0], tree_flatten(x)[1])


def common_samples(x: object, target: object) -> int:
    """Return how many samples a batch has.

    Raises:
        ConfigurationError: ``x`` and ``target`` differ, or have no one number of samples.
    """
    samples = num_samples(arguments(x), "x")
    of_target = num_samples(target, "target")
    if samples != of_target:
        raise ConfigurationError(
            f"x has {samples} samples, but target has {of_target}.", do="pass x and target of the same batch"
        )
    return samples
