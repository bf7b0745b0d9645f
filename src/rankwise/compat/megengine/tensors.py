# SPDX-License-Identifier: Apache-2.0
"""``mge.tensor`` and ``mge.Parameter``: torch's tensors on this rank's device; and dtypes by any name."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch

from rankwise.comm.session import current_or_none
from rankwise.errors import ConfigurationError


def tensor(data: Any, dtype: object = None, device: str | None = None) -> torch.Tensor:
    """Return a copy of some data as a tensor on this rank's device.

    Args:
        data: array, tensor, number, or nested lists of numbers.
        dtype: of the result; default: of the data, but NumPy's float64 becomes torch's default dtype (float32 unless
            ``torch.set_default_dtype`` was called), since MegEngine has no float64. Integers keep theirs.
        device: of torch, ``"cpu"`` or ``"cuda:0"``; default: this rank's, or the CPU if no world has been joined.

    Raises:
        ConfigurationError: the dtype is unknown.
    """
    wanted = None if dtype is None else dtype_of(dtype)
    if wanted is None and isinstance(data, np.ndarray | np.generic) and data.dtype == np.float64:
        wanted = torch.get_default_dtype()
    session = current_or_none()
    where = device or ("cpu" if session is None else session.world.device)
    if isinstance(data, torch.Tensor):
        return data.detach().to(device=where, dtype=wanted, copy=True)
    # The copy is contiguous and writable, as torch requires of arrays.
    given = np.array(data) if isinstance(data, np.ndarray | np.generic) else data
    return torch.tensor(given, dtype=wanted, device=where)


def Parameter(data: Any, dtype: object = None, device: str | None = None) -> torch.nn.Parameter:  # noqa: N802 - as MegEngine has it
    """Return a copy of some data as a parameter of a model. Arguments as for :func:`tensor`."""
    return torch.nn.Parameter(tensor(data, dtype, device))


def dtype_of(given: object) -> torch.dtype:
    """Return torch's dtype for torch's or NumPy's, or its name: ``"float32"``, ``"torch.float32"``, ``np.float32``."""
    if isinstance(given, torch.dtype):
        return given
    name = given.removeprefix("torch.") if isinstance(given, str) else _name_in_numpy(given)
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ConfigurationError(
            f"torch has no dtype {given!r}.", do='pass tensor.dtype, or its name as a string: "float32", "int64"'
        )
    return found


def _name_in_numpy(given: object) -> str:
    try:
        return np.dtype(cast("Any", given)).name
    except TypeError:
        return ""
