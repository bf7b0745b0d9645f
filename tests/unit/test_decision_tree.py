# SPDX-License-Identifier: Apache-2.0
"""The tree of docs/which-call.md: docs/decision_tree.py makes picture and text, and each call has a section."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

DRAWING = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "decision_tree.py"))
EDITIONS: tuple[Any, ...] = DRAWING["EDITIONS"]


@pytest.mark.parametrize("edition", EDITIONS, ids=("English", "Chinese"))
def test_picture_and_text_are_those_of_the_tree(edition: Any) -> None:
    page = edition.page.read_text(encoding="utf-8")
    assert edition.picture.read_text(encoding="utf-8") == DRAWING["draw"](edition), "run python docs/decision_tree.py"
    assert f"({edition.picture.name})" in page
    assert DRAWING["TEXT_BLOCK"].findall(page) == [DRAWING["text"](edition)], "run python docs/decision_tree.py"


@pytest.mark.parametrize("edition", EDITIONS, ids=("English", "Chinese"))
def test_each_call_has_a_section_and_each_section_a_call(edition: Any) -> None:
    page = edition.page.read_text(encoding="utf-8")
    sections = {DRAWING["anchor"](heading) for heading in re.findall(r"^## (.+)$", page, re.MULTILINE)}
    assert set(re.findall(r"\]\(#(.+?)\)", page)) == sections


def test_the_tree_is_whole_in_chinese() -> None:
    chinese: dict[str, str] = DRAWING["CHINESE"]
    twice = [name for name in ("Horovod", "MegEngine", "Slurm", "Kubernetes") for _ in ("answer", "heading")]
    same_in_both = [text for text in _texts(DRAWING["TREE"]) if text not in chinese]
    assert same_in_both == [*twice[:4], "nn.DataParallel", *twice[4:]]
    shown = DRAWING["draw"](EDITIONS[1]) + EDITIONS[1].page.read_text(encoding="utf-8")
    assert [text for text in chinese.values() if text not in shown] == []


def _texts(tree: Any) -> Iterator[str]:
    for question in tree:
        yield question.text
        for answer, end in question.answers:
            yield answer
            yield from _texts((end,)) if hasattr(end, "answers") else (end.heading,)
