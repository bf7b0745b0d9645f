# SPDX-License-Identifier: Apache-2.0
"""The error for ranks that call different collectives: what differs, which rank is the odd one out, its line, the fix.

Values in, an error out. Used by the backends, which compare before they send, and by the diagnosis of a hang.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankwise.errors import CollectiveMismatch, fold_ranks

if TYPE_CHECKING:
    from collections.abc import Mapping

LONGEST_WORDS = 160
"""Longer descriptions are cut around their first difference."""
LONGEST_TABLE = 12
"""How many groups of ranks are listed separately."""
_KIND = re.compile(r"(\w+)(\[[\d, ]*\])")
_GRADIENTS = ("gradients", "buckets", "loss of")
"""How the descriptions of collectives within backward begin."""
_SAME_ORDER = (
    "call the same collectives in the same order on every rank; "
    "no branch around them may depend on a value that differs between ranks"
)
_BACKWARD = (
    "run backward the same number of times on every rank: decide whether to skip a step or stop with "
    "rankwise.mean(loss, len(x)), which is the same on every rank"
)


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """The collective that one rank called."""

    words: str
    site: str = ""
    """The user's line, as ``train.py:33 in load``."""
    hostname: str = ""


def calls_differ(calls: Mapping[int, CollectiveCall], world_size: int) -> CollectiveMismatch:
    """Return the error for ranks of which the known ones called different collectives."""
    shown = _shortened({rank: call.words for rank, call in calls.items()})
    what, do = _difference([call.words for call in calls.values()])
    return CollectiveMismatch(what, where=_where(calls, world_size), evidence=_evidence(calls, shown), do=do)


def advice(all_words: list[str]) -> str:
    """Return the fix for ranks that wait for the collectives described in ``all_words``."""
    return _difference(all_words)[1]


def _difference(all_words: list[str]) -> tuple[str, str]:
    """Return what differs, and the fix."""
    names = {_name(words) for words in all_words}
    name = min(names)
    about_gradients = any(name.startswith(_GRADIENTS) for name in names)
    if len(names) > 1:
        return "Ranks called different collectives.", _advice_for(names) if about_gradients else _SAME_ORDER
    dtypes = len({tuple(kind[0] for kind in _KIND.findall(words)) for words in all_words}) > 1
    shapes = len({tuple(kind[1] for kind in _KIND.findall(words)) for words in all_words}) > 1
    others = len({_KIND.sub("", words) for words in all_words}) > 1
    if about_gradients:
        do = "use the same model on every rank, in the same dtype and with the same parameters frozen"
    elif not others and dtypes:
        do = "convert to one dtype on every rank first; a Python int and a Python float differ too"
    elif not others and name == "all_gather":
        do = (
            'pass remainder="drop" to rankwise.DataLoader, or use rankwise.all_gather_uneven(), '
            "which accepts values of different shapes"
        )
    elif not others:
        do = 'pass the same shapes on every rank; if batches differ, pass remainder="drop" to rankwise.DataLoader'
    else:
        do = "pass the same arguments on every rank"
    what = "arguments" if others else " and ".join(["shapes"] * shapes + ["dtypes"] * dtypes)
    return f"{name} was called with different {what}.", do


def _advice_for(names: set[str]) -> str:
    """Return the fix for ranks of which some are in backward, and others perhaps in a call of the script."""
    called = sorted(name for name in names if not name.startswith(_GRADIENTS))
    if not called:
        return _BACKWARD
    return f"make the call for {', '.join(called)} on every rank, not only on some of them; or {_BACKWARD}"


def _name(words: str) -> str:
    """Return ``all_reduce`` for ``all_reduce("sum", float32[2])``."""
    return re.split(r"[(:]", words, maxsplit=1)[0].strip()


def _where(calls: Mapping[int, CollectiveCall], world_size: int) -> str:
    """Return the ranks that differ from the majority."""
    counts = Counter(call.words for call in calls.values()).most_common()
    if len(counts) > 1 and counts[0][1] == counts[1][1]:
        return "reported on every rank"
    odd = [rank for rank, call in calls.items() if call.words != counts[0][0]]
    hosts = sorted({calls[rank].hostname for rank in odd} - {""})
    who = fold_ranks(odd)
    who = f"{who}/{world_size}" if len(odd) == 1 else f"{who} of {world_size}"
    where = f" on {', '.join(hosts[:4])}{', ...' if len(hosts) > 4 else ''}" if hosts else ""  # noqa: PLR2004 - a line
    return f"{who}{where}, reported on every rank"


def _evidence(calls: Mapping[int, CollectiveCall], shown: Mapping[int, str]) -> str:
    ranks_of: dict[tuple[str, str], list[int]] = {}
    for rank in sorted(calls):
        ranks_of.setdefault((shown[rank], calls[rank].site), []).append(rank)
    lines = [
        f"{fold_ranks(ranks)}: {words}" + (f" at {site}" if site else "") for (words, site), ranks in ranks_of.items()
    ]
    return "\n".join(lines[:LONGEST_TABLE] + ["..."] * (len(lines) > LONGEST_TABLE))


def _shortened(words_of: Mapping[int, str]) -> dict[int, str]:
    """Cut long descriptions around the first position where any two differ."""
    if all(len(words) <= LONGEST_WORDS for words in words_of.values()):
        return dict(words_of)
    columns = zip(*words_of.values(), strict=False)
    shortest = min(map(len, words_of.values()))
    first = next((index for index, letters in enumerate(columns) if len(set(letters)) > 1), shortest)
    low = max(first - LONGEST_WORDS // 2, 0)
    return {
        rank: ("..." if low else "")
        + words[low : low + LONGEST_WORDS]
        + ("..." if low + LONGEST_WORDS < len(words) else "")
        for rank, words in words_of.items()
    }
