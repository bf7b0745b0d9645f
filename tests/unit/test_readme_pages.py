# SPDX-License-Identifier: Apache-2.0
"""Both READMEs show the same, their figures are those of docs/benchmarks.md, and their badges are true."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from rankwise.version import VERSION

ROOT = Path(__file__).parents[2]
READMES = ("README.md", "README.zh.md")
MOST_MEASURED_ROWS = 11
NUMBER = re.compile(r"\d+\.\d+")


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks_of(page: str) -> list[str]:
    """Return the blocks of code without their comments."""
    return [re.sub(r" +#.*", "", block) for block in re.findall(r"^```.*\n(?:.*\n)*?```$", text_of(page), re.MULTILINE)]


def tables_of(page: str) -> list[list[list[str]]]:
    """Return the cells of each table, without its two lines of head."""
    tables = re.findall(r"(?:^\|.*\n)+", text_of(page), re.MULTILINE)
    return [[line.strip("|").split("|") for line in table.splitlines()[2:]] for table in tables]


def test_both_pages_have_the_same_snippets() -> None:
    first, second = (blocks_of(page) for page in READMES)
    assert len(first) > 1
    assert first == second


def test_both_pages_have_the_same_headings_and_items() -> None:
    first, second = (re.findall(r"^(#+|-) ", text_of(page), re.MULTILINE) for page in READMES)
    assert "##" in first
    assert first == second


def test_both_pages_lead_to_the_same_pages() -> None:
    ours = [re.findall(r'(?:\]\(|src="|srcset=")([^)"]+)[)"]', text_of(page)) for page in READMES]
    first, second = ([link for link in links if link not in READMES] for links in ours)
    of_english = [link.replace("docs/zh/", "docs/") for link in second]
    more = {link for link in of_english if link not in first}
    assert [link for link in of_english if link not in more] == first
    assert {link for link in second if link.replace("docs/zh/", "docs/") in more} == {
        link.replace("docs/", "docs/zh/") for link in more
    }, "only Chinese pages are linked to besides"
    missing = [link for link in {*first, *second} if not link.startswith("https:") and not (ROOT / link).exists()]
    assert missing == []


def test_the_chinese_page_leads_to_chinese_pages() -> None:
    english = re.findall(r"\]\(docs/([\w-]+\.md)\)", text_of("README.zh.md"))
    assert [page for page in english if (ROOT / "docs/zh" / page).exists()] == []


def test_both_pages_have_the_same_figures() -> None:
    first, second = (
        [NUMBER.findall(line) for line in re.findall(r"<img.*|^\|.*|1e-\d+", text_of(page), re.MULTILINE)]
        for page in READMES
    )
    assert sum(map(len, first)) > MOST_MEASURED_ROWS
    assert first == second


def test_each_measured_row_is_one_of_the_benchmarks() -> None:
    measured = tables_of("README.md")[-1]
    assert len(measured) <= MOST_MEASURED_ROWS
    known = {ratio for table in tables_of("docs/benchmarks.md") for row in table for ratio in NUMBER.findall(row[-1])}
    assert [row for row in measured if not set(NUMBER.findall(row[-1])) <= known] == []


@pytest.mark.parametrize("page", READMES)
def test_the_badges_are_true(page: str) -> None:
    project = tomllib.loads(text_of("pyproject.toml"))["project"]
    pythons = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    torches = {row[1].strip().rpartition(".")[0] for row in tables_of("docs/versions.md")[0]} - {""}
    assert f"badge/python-{'%20%7C%20'.join(pythons)}-" in text_of(page)
    assert f"badge/torch-{'%20%7C%20'.join(sorted(torches, key=lambda one: int(one[2:])))}-" in text_of(page)
    assert f"badge/license-{project['license'].replace('-', '--')}-" in text_of(page)


def test_the_version_is_the_same_in_all_places() -> None:
    assert re.findall(r"^## \[(.+?)\]", text_of("CHANGELOG.md"), re.MULTILINE)[0] == VERSION
    assert re.findall(r"^version: (.+)$", text_of("CITATION.cff"), re.MULTILINE) == [VERSION]
