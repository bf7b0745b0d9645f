# SPDX-License-Identifier: Apache-2.0
"""Whose call a replaced function serves: the script's, a library's, or torch's and rankwise's own."""

from __future__ import annotations

import sys

from rankwise.health.call_site import responsible_module

_MEANS = ("rankwise.health.", "rankwise.auto.", "rankwise.verify.")
_INSTALLED = ("site-packages", "dist-packages")


def calling_module() -> str:
    """Return the name of the module that calls; Python's and NumPy's are passed over.

    It is ``__main__`` for the script and for modules that lie beside it.
    """
    name = responsible_module(_MEANS)
    return "__main__" if is_of_script(name) else name


def is_of_script(name: str) -> bool:
    """Return whether a module is the script or one that it brings along, not an installed library."""
    if name == "__main__":
        return True
    root = name.partition(".")[0]
    file = getattr(sys.modules.get(root), "__file__", None) or getattr(sys.modules.get(name), "__file__", None)
    is_library = root in sys.stdlib_module_names or root in {"torch", "rankwise"} or file is None
    return not is_library and not any(folder in str(file) for folder in _INSTALLED)
