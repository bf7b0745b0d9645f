# SPDX-License-Identifier: Apache-2.0
"""Errors of other libraries that get a note with the fix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch

from rankwise.comm.session import annotate

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize(
    ("call", "value", "fix"),
    [
        (np.dtype, torch.float32, "write tensor.dtype in place of np.dtype(tensor.dtype).name"),
        (urlsplit, "tcp://host[0-1]:29500", "scontrol show hostnames | head -n 1"),
    ],
)
def test_an_error_gets_a_note_once(call: Callable[[Any], object], value: object, fix: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        call(value)
    annotate(caught.value)
    annotate(caught.value)
    assert [note for note in caught.value.__notes__ if fix in note] == caught.value.__notes__
    assert len(caught.value.__notes__) == 1


def test_other_errors_have_none() -> None:
    error = ValueError("a bad address")
    annotate(error)
    assert not hasattr(error, "__notes__")
