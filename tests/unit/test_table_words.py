# SPDX-License-Identifier: Apache-2.0
"""Long names in the tables of the site: where a browser may break them."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXTENSIONS = Path(__file__).parents[2] / "docs" / "extensions"
WORDS = runpy.run_path(str(EXTENSIONS / "table_words.py"))


@pytest.mark.parametrize(
    "parts",
    [
        ["torch.", "multiprocessing.", "spawn"],
        ["rw.", "DataLoader(", "dataset, ...)"],
        ["Distributed", "DataParallel"],
        ["with rw.", "local_", "rank_", "zero_", "first(", '"making volumes"):'],
        ["--processes-", "per-", "node=2"],
        ["transformers", "==5.23.0"],
        ["join(", "backend=", '"gloo")'],
        ["test_", "host_", "reads.py"],
        ["rw.launch and rw.mean(x), --nodes 1:2"],
    ],
    ids="".join,
)
def test_a_long_name_breaks_between_its_parts(parts: list[str]) -> None:
    assert WORDS["parted"]("".join(parts), "|") == "|".join(parts)


def test_code_and_text_of_tables_are_marked_and_nothing_else() -> None:
    name, start = "torch.multiprocessing", '<table class="docutils align-default">'
    code = f'<code class="docutils"><span class="pre">{name}</span></code>'
    page = {"body": f'<p>{code} {name}</p>{start}<td><a href="{name}">{name}</a> {code}</td></table>'}
    WORDS["mark_page"](None, "page", "page.html", page, None)
    marked = (
        '<code class="docutils"><span class="pre">torch.</span><wbr/><span class="pre">multiprocessing</span></code>'
    )
    assert page["body"] == (
        f'<p>{code} {name}</p>{start}<td><a href="{name}">torch.<wbr/>multiprocessing</a> {marked}</td></table>'
    )
