# SPDX-License-Identifier: Apache-2.0
"""Settings of Sphinx for both trees of pages: docs/ in English, docs/zh/ in Chinese (``-t zh``). See ``make docs``."""

# pyright: reportUndefinedVariable=false
from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import jieba
from pygments.lexers.special import TextLexer

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "extensions"), str(HERE.parent / "src")]

from rankwise.version import VERSION  # noqa: E402 - of this working tree, not an installed one

if TYPE_CHECKING:
    from sphinx.application import Sphinx

is_chinese = tags.has("zh")  # type: ignore[name-defined]  # noqa: F821 - Sphinx puts `tags` here

project = "rankwise"
version = release = VERSION
project_copyright = "the rankwise authors, Apache-2.0"
language = "zh_CN" if is_chinese else "en"
templates_path = ["_templates"]
exclude_patterns = [] if is_chinese else ["zh"]

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "cards",
    "sphinx_copybutton",
    "command_line",
    "constructors",
    "contributors",
    "decision_trees",
    "languages",
    "short_names",
    "table_words",
    "two_codes",
]

myst_enable_extensions = ["colon_fence"]
# As GitHub makes them, for links to headings.
myst_heading_anchors = 4
# Output of programs, unless a block says otherwise.
highlight_language = "text"

# The reference is made from the docstrings without the packages that rankwise needs: torch alone is 2 GB.
autodoc_mock_imports = ["cloudpickle", "numpy", "safetensors", "torch", "tqdm"]
autodoc_default_options = {"members": True, "inherited-members": True, "member-order": "bysource"}
autodoc_inherit_docstrings = False
add_module_names = False
maximum_signature_line_length = 80
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Called by", "returns_style")]
autosummary_generate = False

# Names of Python, torch and NumPy lead nowhere, since their pages may be out of reach; ours have to lead somewhere.
nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"(?!rankwise\b).*"),
    ("py:class", r".*\.[A-Z]"),  # type variables
    ("py:class", r".*\.(Commits|Session|Sized|Weights)"),  # in signatures, but nothing that a script makes
    ("py:class", r".*\.groups\.Group"),  # documented under another name, so that plain Group is rankwise's own
]

# jieba splits Chinese pages into words. By default it prints messages, and reads a cache in
# /tmp that any user may have written.
jieba.setLogLevel(logging.WARNING)
jieba.dt.tmp_dir = str(HERE.parent / "build" / "docs")

html_theme = "furo"
html_title = f"rankwise {VERSION}"
html_theme_options = {"light_logo": "logo-light.svg", "dark_logo": "logo-dark.svg", "sidebar_hide_name": True}
html_favicon = "_static/icon.svg"
html_static_path = ["_static"]
html_css_files = ["rankwise.css"]
html_copy_source = False
html_show_sourcelink = False
html_js_files = [("search_chinese.js", {"priority": 100}), "labels_chinese.js"] if is_chinese else []
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar/search.html",
        "languages.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}
linkcheck_timeout = 20


def keep_summary(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:  # noqa: ARG001, PLR0917 - as Sphinx calls it
    """Keep the first paragraph of a module's docstring: the others are for contributors."""
    if what == "module" and "" in lines:
        del lines[lines.index("") :]


def setup(app: Sphinx) -> None:
    """Show the drawing of layers in architecture.md as it stands."""
    app.connect("autodoc-process-docstring", keep_summary)
    app.add_lexer("layers", TextLexer)
