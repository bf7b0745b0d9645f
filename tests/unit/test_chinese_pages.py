# SPDX-License-Identifier: Apache-2.0
"""Each page of docs/zh says what its English page says: as many headings and paragraphs, the same code and figures."""

from __future__ import annotations

import argparse
import inspect
import re
import runpy
from collections import Counter
from pathlib import Path
from typing import cast

import pytest

import rankwise
from rankwise.cli import _parser

DOCS = Path(__file__).parents[2] / "docs"
CHINESE = sorted(path.relative_to(DOCS / "zh").as_posix() for path in (DOCS / "zh").rglob("*.md"))
NAVIGATION = "index.md"
"""Lists pages, and not the same ones in both languages."""
PAGES = [page for page in CHINESE if page != NAVIGATION]
OVERVIEWS = {"reference/index.md", "reference/command-line.md", "reference/data-loader.md"}
"""Say in a line each what the English pages say at length, from docstrings and parsers."""
TWINS = [page for page in PAGES if page not in OVERVIEWS]
ORIGINS = ("dataparallel", "ddp", "torchrun", "rpc", "megengine", "monai", "horovod", "accelerate")
"""What users come from, beside Slurm and models in parts."""
BLOCK = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
HIDDEN = re.compile(r"<!--.*?-->", re.DOTALL)
COMMENT = re.compile(r"(?:^|\s+)#.*$", re.MULTILINE)
FIGURE = re.compile(r"\d+(?:\.\d+)?")
ENGLISH_ONLY = re.compile(r"[A-Za-z][a-z]+(?: [a-z]+){7,}")
"""A sentence that was left in English."""


def _text(page: str) -> str:
    return HIDDEN.sub("", (DOCS / page).read_text(encoding="utf-8"))


def _prose(page: str) -> str:
    return BLOCK.sub("", _text(page))


def _headings(page: str) -> list[int]:
    return [len(marks) for marks in re.findall(r"^(#+) ", _prose(page), re.MULTILINE)]


def _code(page: str) -> list[str]:
    """Return the blocks without comments and ``../``: the files they include are a folder further up in Chinese."""
    return [COMMENT.sub("", block).replace("../", "") for block in BLOCK.findall(_text(page))]


def _paragraphs(page: str) -> list[int]:
    """Return how many items or rows each paragraph, list and table has, those of tables of code aside."""
    pieces = re.split(r"\n\s*\n", re.sub(r"<table>.*?</table>", "", _prose(page), flags=re.DOTALL).strip())
    return [len(re.findall(r"^(?: *- |\|)", piece, re.MULTILINE)) for piece in pieces]


def _figures(page: str) -> Counter[str]:
    return Counter(FIGURE.findall(re.sub(r"\]\(.*?\)", "]", _prose(page))))


def _names(page: str) -> set[str]:
    return {" ".join(name.split()) for name in re.findall(r"`([^`]+)`", _prose(page))}


def _links(page: str) -> Counter[str]:
    """Return the names of the files that a page links to or shows, how often."""
    return Counter(Path(target).name for target in re.findall(r"\]\(([^)#\s]+)", _prose(page)))


def _anchors(page: str) -> set[str]:
    """Return what links to the headings of a page may end in."""
    headings = re.findall(r"^#+ (.+)$", _prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_there_are_pages() -> None:
    assert PAGES
    assert [page for page in PAGES if not (DOCS / page).exists()] == [], "of each Chinese page there is an English one"
    untranslated = runpy.run_path(str(DOCS / "extensions" / "languages.py"))["untranslated"]
    assert untranslated() == [], "of each English page there is a Chinese one"


def _menu(page: str) -> list[list[str]]:
    """Return the pages under each caption of the menu."""
    return [body.split() for body in re.findall(r":caption: .*\n\n((?:.+\n)+)```", (DOCS / page).read_text("utf-8"))]


@pytest.mark.parametrize("page", [NAVIGATION, f"zh/{NAVIGATION}"])
def test_the_first_page_leads_to_the_page_of_each_origin(page: str) -> None:
    sought = {f"from-{origin}.md" for origin in ORIGINS} | {"slurm.md", "7-model-parallel.md", "large-models.md"}
    assert sought - set(_links(page)) == set()


def test_the_menu_has_the_order_of_the_english_one() -> None:
    there = [[page for page in group if f"{page}.md" in PAGES] for group in _menu(NAVIGATION)]
    assert _menu(f"zh/{NAVIGATION}") == [group for group in there if group]


@pytest.mark.parametrize("page", TWINS)
def test_a_page_says_what_the_english_page_says(page: str) -> None:
    chinese = f"zh/{page}"
    assert _headings(chinese) == _headings(page)
    assert _paragraphs(chinese) == _paragraphs(page)
    assert _code(chinese) == _code(page)
    assert _figures(chinese) == _figures(page)
    assert _names(chinese) == _names(page)
    assert _links(chinese) == _links(page)


@pytest.mark.parametrize("page", PAGES)
def test_nothing_is_left_in_english(page: str) -> None:
    prose = re.sub(r"`[^`\n]+`", "", _prose(f"zh/{page}"))
    assert ENGLISH_ONLY.findall(prose) == []


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_pages_and_headings_that_exist(page: str) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", _prose(f"zh/{page}")):
        if "://" in target:
            continue
        file = (DOCS / "zh" / page).parent / target if target else DOCS / "zh" / page
        assert file.exists(), target
        if anchor:
            assert anchor in _anchors(file.resolve().relative_to(DOCS.resolve()).as_posix()), f"{target}#{anchor}"


def _first_cells(text: str) -> list[str]:
    """Return the names in the first column of the tables."""
    return re.findall(r"^\| `([^`]+)`", text, re.MULTILINE)


def test_the_reference_has_a_line_for_each_public_name_with_a_link_to_it() -> None:
    english = (DOCS / "reference" / "index.md").read_text(encoding="utf-8")
    there = [
        (f"rw.{name}", page)
        for page, body in re.findall(r"^## \[.+\]\((.+)\)\n((?:(?!## ).*\n)*)", english, re.MULTILINE)
        for name in re.findall(r"^   rankwise\.(\w+)$", body, re.MULTILINE)
    ]
    chinese = (DOCS / "zh" / "reference" / "index.md").read_text(encoding="utf-8")
    row = r"^\| \[`(rw\.\w+)`\]\(\.\./\.\./reference/([\w-]+\.md)(?:#\w+)?\) \| \S"
    assert re.findall(row, chinese, re.MULTILINE) == there


def test_the_command_line_has_each_option_of_each_command() -> None:
    (commands,) = (one for one in _parser()._actions if isinstance(one.choices, dict))
    there = {
        f"rankwise {name}": sorted(
            [*action.option_strings]
            for action in command._actions
            if action.option_strings and action.dest != "help" and action.help != argparse.SUPPRESS
        )
        for name, command in cast("dict[str, argparse.ArgumentParser]", commands.choices).items()
    }
    chinese = (DOCS / "zh" / "reference" / "command-line.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## `(.+)`\n((?:(?!## ).*\n)*)", chinese, re.MULTILINE)
    spelled = {
        command: sorted(re.findall(r"(?:^|, )(-[\w-]+)", cell) for cell in _first_cells(body))
        for command, body in sections
    }
    assert spelled == there


def test_the_arguments_of_the_data_loader_are_those_it_has() -> None:
    page = (DOCS / "zh" / "reference" / "data-loader.md").read_text(encoding="utf-8")
    table = page.partition("| 参数 |")[2].partition("\n\n")[0]
    arguments = inspect.signature(rankwise.DataLoader).parameters.values()
    named = [one.name for one in arguments if one.kind in {one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY}]
    assert _first_cells(table) == named
