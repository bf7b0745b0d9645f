# SPDX-License-Identifier: Apache-2.0
"""A dtype by any of the names it goes by: torch's, NumPy's, or text. Pure."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch

from rankwise.errors import ConfigurationError


def dtype_of(given: object) -> torch.dtype:
    """Return torch's dtype.

    Args:
        given: torch's or NumPy's dtype, or its name: ``"float32"``, ``"torch.float32"``, ``np.float32``.

    Raises:
        ConfigurationError: torch has no such dtype.
    """
    if isinstance(given, torch.dtype):
        return given
    name = given.removeprefix("torch.") if isinstance(given, str) else _name_in_numpy(given)
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ConfigurationError(
            f"torch has no dtype {given!r}.", do='pass tensor.dtype, or its name as text: "float32", "int64"'
        )
    return found


def _name_in_numpy(given: object) -> str:
    try:
        return np.dtype(cast("Any", given)).name
    except TypeError:
        return ""
