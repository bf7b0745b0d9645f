# SPDX-License-Identifier: Apache-2.0
"""Raising an error in another thread, which may be inside a call into a device at that moment."""

from __future__ import annotations

import ctypes


def raise_in_thread(thread_id: int, error: BaseException | None) -> None:
    """Have a thread raise ``error`` as soon as it runs Python code again; ``None`` withdraws one not raised yet.

    Does nothing if the thread has ended.

    Source: PyThreadState_SetAsyncExc, which takes a class; so this one's only instance is ``error``.
    """
    if error is None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), None)
        return
    kind = type(error)
    stand_in = type(kind.__name__, (kind,), {"__new__": lambda *_: error, "__module__": kind.__module__})
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), ctypes.py_object(stand_in))
