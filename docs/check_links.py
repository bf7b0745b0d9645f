# SPDX-License-Identifier: Apache-2.0
"""Check that every link inside the built site leads to a file, and to an anchor in it: ``check_links.py site``.

Sphinx checks links of the text; this also sees those that templates and raw HTML make, and those between languages.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ADDRESSES = {"a": "href", "link": "href", "img": "src", "script": "src", "source": "srcset"}
"""Which attribute of which element leads to another file."""


@dataclass
class Page(HTMLParser):
    """What a page leads to, and where others may lead in it."""

    links: set[str] = field(default_factory=set)
    anchors: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note the element's link and its anchor."""
        values = {name: value for name, value in attrs if value}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if (address := values.get(ADDRESSES.get(tag, ""))) is not None:
            self.links.add(address)


def broken(site: Path) -> list[str]:
    """Return a line for each link that leads nowhere."""
    pages: dict[Path, Page] = {}
    for path in sorted(site.rglob("*.html")):
        pages[path.resolve()] = page = Page()
        page.feed(path.read_text(encoding="utf-8"))
    found: list[str] = []
    for path, page in pages.items():
        for link in sorted(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.is_file():
                found.append(f"{path.relative_to(site.resolve())}: {link}: no such file")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                found.append(f"{path.relative_to(site.resolve())}: {link}: no such anchor")
    return found


if __name__ == "__main__":
    sys.exit("\n".join(broken(Path(sys.argv[1]))) or None)
