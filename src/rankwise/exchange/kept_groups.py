# SPDX-License-Identifier: Apache-2.0
"""Torch's groups that outlive their world: what is under way in them may never end, or ends a little later.

Imported by process_group and by the launcher's ranks.
"""

from __future__ import annotations

import ctypes

from rankwise.torch_private.groups import open_groups

_kept: list[bool] = []
_held: list[object] = []


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


def hold_groups() -> None:
    """Hold torch's open groups until the next call, so that whoever releases one meanwhile is not the last to.

    The last one waits for gloo's threads. torch's DDP, when it is freed after its group was destroyed, does so with the
    interpreter's lock, for which such a thread may be waiting: it has just carried out a collective of backward, and
    frees what that kept of Python. Neither would continue.
    """
    _held[:] = open_groups()
