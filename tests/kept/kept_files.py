# SPDX-License-Identifier: Apache-2.0
"""The expected contents of the kept files, which ``make.py`` wrote beside them, and comparisons with these."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

if TYPE_CHECKING:
    from pathlib import Path

    from kept_models import Tensors

TOLERANCE = 1e-10
"""For values computed from a file. Values read from it must be equal to the bit."""


def expected(kept: Path, name: str, kind: str) -> Tensors:
    """Return the expected tensors: those that were ``saved``, or those ``after`` further steps."""
    found = load_file(kept / "expected" / f"{name}.safetensors")
    return {key.removeprefix(f"{kind}:"): tensor for key, tensor in found.items() if key.startswith(f"{kind}:")}


def told(kept: Path, name: str) -> Any:
    """Return the other expected values."""
    return json.loads((kept / "expected" / f"{name}.json").read_text())


def below(tensors: Tensors, path: str) -> Tensors:
    """Return the tensors below a path."""
    return {key.removeprefix(f"{path}/"): tensor for key, tensor in tensors.items() if key.startswith(f"{path}/")}


def assert_same_bits(found: Tensors, wanted: Tensors) -> None:
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert found[key].dtype == tensor.dtype, key
        assert torch.equal(found[key], tensor), key


def assert_close(found: Tensors, wanted: Tensors) -> None:
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        torch.testing.assert_close(found[key], tensor, rtol=TOLERANCE, atol=TOLERANCE)
