# SPDX-License-Identifier: Apache-2.0
"""Let a docstring name a class as its code does: ``PeerFailed`` leads to ``rankwise.errors.PeerFailed``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from docutils import nodes
    from sphinx.addnodes import pending_xref
    from sphinx.application import Sphinx
    from sphinx.domains.python import PythonDomain
    from sphinx.environment import BuildEnvironment


def setup(app: Sphinx) -> dict[str, Any]:
    """Resolve what Sphinx cannot."""
    app.connect("missing-reference", resolve)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def resolve(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.TextElement
) -> nodes.reference | None:
    """Return a link to the one documented object of ``rankwise`` with this last word, if there is just one."""
    if node.get("refdomain") != "py" or "." in node["reftarget"]:
        return None
    domain = cast("PythonDomain", env.get_domain("py"))
    ending = f".{node['reftarget']}"
    # The words of other libraries (compat) are written out where they are meant.
    found = [name for name in domain.objects if name.endswith(ending) and not name.startswith("rankwise.compat.")]
    if len(found) != 1:
        return None
    return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", found[0], node, content)
