# SPDX-License-Identifier: Apache-2.0
"""List every text that rankwise shows: errors, warnings, lines of the log, help of commands.

``docs/messages.py`` prints each with its file and line, to be read as a whole; ``docs/messages.py --avoid
docs/avoided.txt`` prints those that hold a phrase of that list and fails when there is one, as ``make lint`` asks.
A text here is a string of three words or more that is no docstring; values in braces stand as their expressions.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "rankwise"
WORDS_OF_A_TEXT = 3


class Text(NamedTuple):
    """One text of the source."""

    file: Path
    line: int
    words: str


def shown_texts(folder: Path = SOURCE) -> list[Text]:
    """Return the texts of all modules below ``folder``, by file and line."""
    return [
        Text(file, line, words)
        for file in sorted(folder.rglob("*.py"))
        for line, words in _texts(ast.parse(file.read_text("utf-8")))
    ]


def _texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    if isinstance(tree, ast.Expr) and isinstance(tree.value, ast.Constant):
        return  # a docstring, or one of an attribute
    words = _joined(tree)
    if words is not None:
        if len(re.findall(r"[^\W\d_]{2,}", re.sub(r"\{[^}]*\}", "", words))) >= WORDS_OF_A_TEXT and " " in words:
            yield getattr(tree, "lineno", 0), words
        return
    for child in ast.iter_child_nodes(tree):
        yield from _texts(child)


def _joined(tree: ast.AST) -> str | None:
    """Return the text that a string, an f-string or a sum of them makes; None for everything else."""
    match tree:
        case ast.Constant(value=str(words)):
            return words
        case ast.JoinedStr(values=parts):
            return "".join(_part(part) for part in parts)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            first, second = _joined(left), _joined(right)
            return None if first is None or second is None else first + second
        case _:
            return None


def _part(tree: ast.expr) -> str:
    if isinstance(tree, ast.FormattedValue):
        return "{" + ast.unparse(tree.value) + "}"
    return _joined(tree) or ""


def avoided(texts: Sequence[Text], phrases: Sequence[str]) -> list[tuple[Text, str]]:
    """Return each text that holds one of ``phrases`` as whole words, whatever their case, with the phrase."""
    patterns = [(re.compile(rf"(?<!\w){re.escape(phrase)}(?!\w)", re.IGNORECASE), phrase) for phrase in phrases]
    return [(text, phrase) for text in texts for pattern, phrase in patterns if pattern.search(text.words)]


def phrases_of(file: Path) -> list[str]:
    """Return the phrases of a list: one a line, before an arrow and what to write in its place."""
    lines = (line.split("->")[0].strip() for line in file.read_text("utf-8").splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def paragraphs_of(page: Path) -> list[Text]:
    """Return the lines of a page's prose: snippets and what stands between backticks left out."""
    texts: list[Text] = []
    fenced = False
    for number, line in enumerate(page.read_text("utf-8").splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            texts.append(Text(page, number, re.sub(r"`[^`]*`", "``", line)))
    return texts


def main() -> int:
    """Print the texts, or those that hold a phrase to avoid."""
    parser = argparse.ArgumentParser(description="every text that rankwise shows")
    parser.add_argument("--avoid", type=Path, help="a list of phrases: print only the texts that hold one, and fail")
    parser.add_argument("pages", nargs="*", type=Path, help="pages of prose to search for the phrases, too")
    arguments = parser.parse_args()
    texts = shown_texts()
    if arguments.avoid is None:
        for text in texts:
            print(f"{text.file.relative_to(SOURCE)}:{text.line}: {text.words!r}")
        return 0
    texts += [text for page in arguments.pages for text in paragraphs_of(page)]
    found = avoided(texts, phrases_of(arguments.avoid))
    for text, phrase in found:
        print(f"{text.file.resolve().relative_to(ROOT)}:{text.line}: avoid {phrase!r}: {text.words!r}")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
