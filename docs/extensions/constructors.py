# SPDX-License-Identifier: Apache-2.0
"""Show the arguments of a class whose base is a stand-in for one of torch's: the stand-in takes anything."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from sphinx.util.inspect import signature, stringify_signature

if TYPE_CHECKING:
    from sphinx.application import Sphinx

OF_STAND_INS = "(*args: Any, **kwargs: Any)"


def setup(app: Sphinx) -> dict[str, Any]:
    """Ask to be shown every signature."""
    app.connect("autodoc-process-signature", from_constructor)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def from_constructor(  # noqa: PLR0917 - as Sphinx calls it
    app: Sphinx,  # noqa: ARG001
    what: str,  # noqa: ARG001
    name: str,  # noqa: ARG001
    obj: object,
    options: Any,  # noqa: ARG001 - autodoc's
    shown: str | None,
    returns: str | None,
) -> tuple[str | None, str | None] | None:
    """Return the signature of the class's own ``__init__`` in place of a stand-in's."""
    if shown != OF_STAND_INS or not inspect.isclass(obj):
        return None
    for kind in obj.__mro__:
        if kind.__module__.startswith("rankwise.") and "__init__" in vars(kind):
            return stringify_signature(signature(kind.__init__, bound_method=True)), returns
    return None
