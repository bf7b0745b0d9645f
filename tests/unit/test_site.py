# SPDX-License-Identifier: Apache-2.0
"""The pages of the documentation: the reference has every public name, and each page begins with what it is for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import rankwise

DOCS = Path(__file__).parents[2] / "docs"
REFERENCE = "\n".join(path.read_text(encoding="utf-8") for path in sorted((DOCS / "reference").glob("*.md")))
INCLUDED = {"changelog"}
"""A page that is a file of the root of the repository."""
WITHOUT_CODE = {"errors", "security", "which-call"}
"""Pages that begin without a snippet: one for each error or call follows, or there is nothing to type."""
PAGES = sorted(path for path in DOCS.glob("*.md") if path.stem not in INCLUDED)
FIRST_PAGE = (
    "reference/data-loader.md",
    "weights.md#set-the-weight-yourself",
    "failing.md#when-a-rank-hangs",
    "slurm.md",
)
ORIGINS = {
    "DataParallel": "from-dataparallel.md",
    "DDP": "from-ddp.md",
    "torchrun": "from-torchrun.md",
    "Slurm": "slurm.md",
    "model parallelism": "course/7-model-parallel.md",
    "torch.distributed.rpc": "from-rpc.md",
    "MegEngine": "from-megengine.md",
    "MONAI": "from-monai.md",
    "Horovod": "from-horovod.md",
    "Accelerate": "from-accelerate.md",
}
"""What people come from, and the page written for them."""
CHINESE_ORIGINS = {"model parallelism": "模型并行"}


@pytest.mark.parametrize("name", sorted(rankwise.__all__))
def test_a_public_name_is_in_the_reference_and_its_table(name: str) -> None:
    assert re.search(rf"^\.\. auto(?:class|function):: rankwise\.{name}$", REFERENCE, re.MULTILINE)
    assert f"\n   rankwise.{name}\n" in (DOCS / "reference" / "index.md").read_text(encoding="utf-8")


def test_the_reference_has_no_name_that_is_not_public() -> None:
    shown = re.findall(r"^\.\. auto(?:class|function):: rankwise\.(\w+)$", REFERENCE, re.MULTILINE)
    assert sorted(shown) == sorted(rankwise.__all__)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_begins_with_what_it_is_for_and_a_snippet(path: Path) -> None:
    # Comments, settings of the page, and what is folded.
    hidden = r"<!--.*?-->\n*|\A---\n.*?\n---\n+|<details>.*?</details>\n*"
    text = re.sub(hidden, "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    title, _, rest = text.partition("\n")
    assert title.startswith("# ")
    beginning = rest.partition("\n## ")[0].strip()
    assert re.match(r"[*`\[]*\w", beginning), "text stands below the title"
    assert not beginning.startswith("```")
    assert "```" in beginning or path.stem in WITHOUT_CODE


@pytest.mark.parametrize("target", FIRST_PAGE)
def test_the_first_page_leads_to_what_is_asked_for_most(target: str) -> None:
    assert f"]({target})" in (DOCS / "index.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("origin", ORIGINS)
@pytest.mark.parametrize(("page", "names"), [("index.md", {}), ("zh/index.md", CHINESE_ORIGINS)], ids=["en", "zh"])
def test_the_first_page_names_what_people_come_from_next_to_its_page(
    page: str, names: dict[str, str], origin: str
) -> None:
    rows = [line.split("|") for line in (DOCS / page).read_text("utf-8").splitlines() if line.startswith("| ")]
    name, link = names.get(origin, origin), f"]({ORIGINS[origin]})"
    assert [wish for _, wish, pages, _ in rows if name in wish and link in pages]


@pytest.mark.parametrize("number", ["0003", "0016", "0020"])
def test_a_replaced_decision_links_to_its_replacement(number: str) -> None:
    (path,) = (DOCS / "decisions").glob(f"{number}-*.md")
    head = path.read_text(encoding="utf-8").split("\n\n")[1]
    assert head.startswith("**Status.**")
    assert re.search(r"\]\(.*?\)", head)
    assert all((DOCS / "decisions" / page).exists() for page in re.findall(r"\]\((.*?)\)", head))
