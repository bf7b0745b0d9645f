# SPDX-License-Identifier: Apache-2.0
"""Whose call a replaced function serves: the script's, a library's, or torch's and rankwise's own."""

from __future__ import annotations

from rankwise.health.call_site import responsible_module

_MEANS = ("rankwise.health.", "rankwise.tools.")


def calling_module() -> str:
    """Return the name of the module that calls, ``__main__`` for the script; Python's and NumPy's are passed over."""
    return responsible_module(_MEANS)
