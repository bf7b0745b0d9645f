# SPDX-License-Identifier: Apache-2.0
"""Torch's groups that outlive their world: what is under way in them may never end. Imported by process_group."""

from __future__ import annotations

import ctypes

from rankwise.torch_private.groups import open_groups

_kept: list[bool] = []


def keep_groups_forever() -> None:
    """Keep torch's groups from being destroyed, now or when the interpreter ends.

    After a failure collectives may still be under way; destroying their group would wait for ranks that never
    come, or abort the process.
    """
    for group in open_groups():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    _kept.append(True)


def are_groups_kept() -> bool:
    """Return whether a world has failed in this process."""
    return bool(_kept)
