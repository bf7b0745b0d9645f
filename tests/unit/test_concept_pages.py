# SPDX-License-Identifier: Apache-2.0
"""The pages of concepts and of examples are complete; the pictures are those of docs/concept_pictures.py."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
DRAWING = runpy.run_path(str(DOCS / "concept_pictures.py"))
CONCEPTS = (DOCS / "concepts.md").read_text(encoding="utf-8")
EXAMPLES = (DOCS / "examples.md").read_text(encoding="utf-8")
CHINESE = re.compile(r"[\u4e00-\u9fff]")


def rows(page: str) -> list[list[str]]:
    """Return the cells of all rows of a page's tables, without their heads."""
    tables = re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE)
    return [[cell.strip() for cell in line.strip("|").split("|")] for t in tables for line in t.splitlines()[2:]]


@pytest.mark.parametrize("name", DRAWING["PICTURES"])
def test_a_picture_is_the_one_that_is_drawn_and_is_on_the_page(name: str) -> None:
    for language, folder in DRAWING["FOLDERS"].items():
        picture = (folder / f"{name}.svg").read_text(encoding="utf-8")
        assert picture == DRAWING["draw"](name, language), "run python docs/concept_pictures.py"
        assert "prefers-color-scheme: dark" in picture
    (text,) = re.findall(rf"!\[(.+)\]\(images/{name}\.svg\)", CONCEPTS)
    assert len(text.split()) > 5, "the picture is described for those who do not see it"


def test_all_texts_of_the_pictures_are_in_chinese() -> None:
    asked: set[str] = set()
    for drawing in DRAWING["PICTURES"].values():
        drawing(lambda text: asked.add(text) or text)
    assert asked == set(DRAWING["CHINESE"])


def test_the_glossary_has_every_concept_in_both_languages() -> None:
    terms = {english: (chinese, meaning) for english, chinese, meaning in rows(CONCEPTS)}
    assert [term for term, (chinese, meaning) in terms.items() if not (CHINESE.search(chinese) and meaning)] == []
    concepts = {concept.lower() for concept in re.findall(r"\*\*(.+?)\*\*", CONCEPTS)}
    assert concepts - set(terms) == set()
    headings = re.findall(r"^## (.+)$", CONCEPTS, re.MULTILINE)
    shown = {word.lower() for heading in headings[:-1] for word in re.split(r", | and ", heading)}
    assert shown - set(terms) == set()


def test_every_example_has_one_command_and_a_sentence() -> None:
    commands = " ".join(command for command, what in rows(EXAMPLES) if what)
    shown = re.findall(r"examples/(\w+\.py)", commands)
    imported = {"curve.py"}
    assert sorted(shown) == sorted({path.name for path in (ROOT / "examples").glob("*.py")} - imported)
