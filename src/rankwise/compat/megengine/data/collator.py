# SPDX-License-Identifier: Apache-2.0
"""``megengine.data.collator``: makes batches of NumPy arrays or tensors from samples. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rankwise.errors import ConfigurationError

OBJECT_KINDS = "OSUaV"
"""NumPy's letters for dtypes that are not numbers."""


class Collator:
    """Makes a batch from samples; the default of ``DataLoader(collator=)``."""

    def apply(self, inputs: Sequence[Any]) -> Any:
        """Return the samples as one batch.

        Args:
            inputs: samples of one kind: arrays or tensors of one shape, numbers, strings, or dicts, tuples and lists of
                these.

        Returns:
            Arrays and tensors stacked [batch, ...], numbers as an array [batch], strings unchanged; for dicts and named
            tuples one of batches, for other tuples and lists a list of batches.

        Raises:
            ConfigurationError: a sample contains something else.
        """
        first = inputs[0]
        if isinstance(first, str | bytes):
            return inputs
        if isinstance(first, torch.Tensor):
            return torch.stack([*inputs])
        if isinstance(first, np.ndarray | np.generic | int | float):
            return _stacked(inputs)
        if isinstance(first, Mapping):
            return {key: self.apply([one[key] for one in inputs]) for key in first}
        if isinstance(first, Sequence):
            columns = [self.apply(column) for column in zip(*inputs, strict=True)]
            return type(first)(*columns) if hasattr(first, "_fields") else columns
        raise _cannot(type(first).__name__)


def _stacked(inputs: Sequence[Any]) -> np.ndarray[Any, Any]:
    arrays = [np.asarray(one) for one in inputs]
    if arrays[0].dtype.kind in OBJECT_KINDS:
        raise _cannot(f"an array of {arrays[0].dtype}")
    return np.stack(arrays)


def _cannot(what: str) -> ConfigurationError:
    return ConfigurationError(
        f"Cannot make a batch from samples with {what}.",
        do="return arrays, tensors, numbers, strings, or dicts, tuples and lists of these; or pass a collator= "
        "of your own with an apply(inputs) to DataLoader",
    )
