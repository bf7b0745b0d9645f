# SPDX-License-Identifier: Apache-2.0
"""Comparing between ranks while a loader is iterated, through the job's store: no rank waits for another.

The first rank to come to a place posts what it found there; each other one compares its own with that. A collective
would not do: ranks may iterate at their own pace, or look at the first batch on one rank only. Imported by
``sampler`` and ``loader``.
"""

from __future__ import annotations

import json
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from rankwise.data.leaves import Leaf, digest_of, unlike
from rankwise.data.same_data import ON_PURPOSE
from rankwise.errors import DatasetError, fold_values
from rankwise.session import current_or_none
from rankwise.store import StoreLost

if TYPE_CHECKING:
    import numpy.typing as npt

_GET_SECONDS = 60.0
"""How long the store may take for a key that is set."""
_NUM_SINGLE = 64
"""Indices of an order that are posted as they are; of the rest digests of parts are."""
_NUM_PARTS = 64


def check_same_order(place: str, indices: npt.NDArray[np.int64], *, do: str) -> None:
    """Raise unless ``indices`` are those of the first rank that came to ``place``.

    Args:
        place: the same on every rank: which loader, which epoch.
        indices: [samples of the epoch] what the sampler gave.
        do: what makes them the same.

    Raises:
        DatasetError: they are not; the first position that differs is named.
    """
    cuts = _cuts(len(indices))
    digests = [digest_of(np.ascontiguousarray(indices[start:stop]).data) for start, stop in pairwise(cuts)]
    own: dict[str, Any] = {"length": len(indices), "digests": digests, "head": indices[:_NUM_SINGLE].tolist()}
    first = _first_posted(f"order/{place}", own)
    if first is None or first["digests"] == digests:
        return
    differing = zip(first["digests"], digests, strict=False)
    start, stop = next(
        (cut for cut, (one, other) in zip(pairwise(cuts), differing, strict=False) if one != other), (0, 1)
    )
    where = f"position {start}" if stop - start == 1 else f"positions {start} to {stop - 1}"
    shown = slice(max(0, start - 1), start + 4) if start < _NUM_SINGLE else slice(0, 5)
    _raise(
        f"The sampler gave the ranks different orders; the first difference is at {where} of the epoch.",
        first["rank"],
        f"positions from {shown.start}: {first['head'][shown]}",
        f"positions from {shown.start}: {own['head'][shown]}",
        do,
    )


def _cuts(length: int) -> list[int]:
    """Return where an order is cut to be compared: into single indices at first, then into parts."""
    rest = np.linspace(min(_NUM_SINGLE, length), length, _NUM_PARTS + 1).astype(int).tolist()
    return sorted({*range(min(_NUM_SINGLE, length)), *rest})


def check_same_block(place: str, described: str, node_rank: int) -> None:
    """Raise unless a stream's samples are those of the first rank that came to ``place``.

    Args:
        place: the same on every rank: which loader, epoch and position.
        described: by :func:`rankwise.data.leaves.describe_block`.
        node_rank: of this rank; decoders may round differently on another node.

    Raises:
        DatasetError: they are not; the first sample that differs is named.
    """
    own: dict[str, Any] = {"node_rank": node_rank, "samples": json.loads(described)}
    first = _first_posted(f"block/{place}", own)
    if first is None:
        return
    same_host = first["node_rank"] == node_rank
    for index in own["samples"]:
        theirs = {leaf.path: leaf for leaf in (Leaf(*fields) for fields in first["samples"].get(index, ()))}
        for leaf in (Leaf(*fields) for fields in own["samples"][index]):
            other = theirs.get(leaf.path)
            if other is not None and unlike(other, leaf, same_host=same_host):
                label = f"sample {index} of the batch, {leaf.path}" if leaf.path else f"sample {index} of the batch"
                _raise(
                    f"The stream gives the ranks different samples: {label} differs.",
                    first["rank"],
                    other.shown,
                    leaf.shown,
                    "give every rank the whole stream: rankwise takes each rank's part itself, so the dataset must not "
                    "divide itself by rank; draw from random, numpy.random or torch in __iter__ (seeded there, alike "
                    f"on every rank), and sort what os.listdir() returned. Pass {ON_PURPOSE}",
                )


def _first_posted(key: str, value: dict[str, Any]) -> dict[str, Any] | None:
    """Post ``value`` where no rank has posted before; return what the first one posted, ``None`` if that is this."""
    session = current_or_none()
    if session is None or session.store is None:
        return None
    posted = json.dumps(value | {"rank": session.world.rank})
    # Where the store is gone the job is ending, and its end has another reason.
    with suppress(StoreLost, TimeoutError):
        if not session.store.set_if_absent(f"data/{key}", posted):
            return json.loads(session.store.get(f"data/{key}", _GET_SECONDS))  # type: ignore[no-any-return] # a dict
    return None


def _raise(what: str, first_rank: int, first: str, own: str, do: str) -> NoReturn:
    session = current_or_none()
    rank = -1 if session is None else session.world.rank
    raise DatasetError(
        what,
        where=None if session is None else str(session.world),
        evidence="\n".join(fold_values({one: value}) for one, value in ((first_rank, first), (rank, own))),
        do=do,
    )
