# SPDX-License-Identifier: Apache-2.0
"""docs/messages.py finds the texts that rankwise shows, and the phrases that they are to avoid."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

DOCS = Path(__file__).parent.parent.parent / "docs"


@pytest.fixture(scope="module")
def messages() -> Iterator[Any]:
    spec = importlib.util.spec_from_file_location("rankwise_messages", DOCS / "messages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules[spec.name]


MODULE = '''"""A docstring is not shown."""

def refuse(name, count):
    """Neither is this one here."""
    raise ValueError(
        f"{name} waited in vain, "
        "and is named by all " + f"{count + 1} others."
    )

SHORT = "two words"
KEY = "one_name_of_three_words"
'''


def test_texts_are_joined_and_docstrings_left_out(messages: Any, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(MODULE, "utf-8")
    texts = messages.shown_texts(tmp_path)
    assert [(text.line, text.words) for text in texts] == [
        (6, "{name} waited in vain, and is named by all {count + 1} others.")
    ]


def test_a_phrase_is_found_as_whole_words_only(messages: Any, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(MODULE, "utf-8")
    texts = messages.shown_texts(tmp_path)
    assert [phrase for _, phrase in messages.avoided(texts, ["In Vain", "wait", "others"])] == ["In Vain", "others"]


def test_snippets_of_pages_are_not_prose(messages: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Goes on.\n```\ngoes on\n```\nthe name `goes on` stands\n", "utf-8")
    found = messages.avoided(messages.paragraphs_of(page), ["goes on"])
    assert [text.line for text, _ in found] == [1]


def test_every_phrase_of_the_list_can_be_found(messages: Any) -> None:
    phrases = messages.phrases_of(DOCS / "avoided.txt")
    assert len(phrases) == len(set(phrases)) > 20
    assert all(messages.avoided([messages.Text(Path(), 1, f"It {phrase} here.")], [phrase]) for phrase in phrases)
