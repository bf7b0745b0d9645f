# SPDX-License-Identifier: Apache-2.0
"""Two codes side by side, in docs/: each block has the heading of its column as its label."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
LABELS = runpy.run_path(str(DOCS / "extensions" / "two_codes.py"))


def test_each_block_of_each_page_has_the_heading_of_its_column() -> None:
    num_blocks = 0
    for page in [*DOCS.glob("*.md"), *DOCS.glob("zh/*.md")]:
        source = [page.read_text(encoding="utf-8")]
        LABELS["label_blocks"](None, page.stem, source)
        assert "<td>" not in source[0], f"{page} has a block without a label"
        for table in re.findall(r"<table>.*?</table>", source[0], re.DOTALL):
            names = re.findall(r"<th>([^<]+)</th>", table)
            labels = re.findall(r'<td data-code="([^"]+)">', table)
            assert labels == names * (len(labels) // len(names))
            num_blocks += len(labels)
    assert num_blocks > 100
