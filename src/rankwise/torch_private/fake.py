# SPDX-License-Identifier: Apache-2.0
"""Tensors without data, on which a model can run without computing. Takes long to import."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch._subclasses.fake_tensor import unset_fake_temporarily as outside_fake

if TYPE_CHECKING:
    import torch

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "UnsupportedOperatorException",
    "fake_of",
    "fake_tensors",
    "outside_fake",
]


def fake_tensors() -> FakeTensorMode:
    """Return a mode in which new tensors have no data, and tensors with data may be used as well."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_of(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without data that is like ``tensor``."""
    return mode.from_tensor(tensor)
