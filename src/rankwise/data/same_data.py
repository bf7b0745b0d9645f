# SPDX-License-Identifier: Apache-2.0
"""Whether all ranks of a loader or sampler have the same arguments and the same data; if not, which sample differs.

When a loader is created, digests are compared in one collective; only if they differ, more is exchanged to name the
sample, and every rank reaches the same result. During iteration, ranks compare through the job's store and none
waits for another: the first rank to reach a place posts its data, and the others compare theirs with it.
A collective would not work: ranks may iterate at their own pace, or look at the first batch on one rank only.
Samples are read where and as the loader reads them; those that cannot be read or compared are left out: the user sees
the dataset's own error when the training loop reaches that sample.
"""

from __future__ import annotations

import json
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from rankwise.comm.collectives import gather_json
from rankwise.comm.same_state import Posted
from rankwise.comm.session import current, current_or_none
from rankwise.data.batches import map_tensors
from rankwise.data.fingerprints import Leaf, Listing, digest_of, leaves_of, listings_of, unlike
from rankwise.data.shards import BatchRequest, check_not_empty
from rankwise.data.sources import ColumnSource, SampleSource, columns_of
from rankwise.data.workers import WorkerOptions, Workers
from rankwise.errors import ConfigurationError, DatasetError, fold_values
from rankwise.store.client import StoreLost

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt


_NUM_PARTS = 64
"""Parts of a list whose digests are compared at once to find the first entry that differs."""
_MOST_SAMPLES = 8
"""Samples that are read again to see whether a difference is random."""
_MOST_LINES = 8
_LONGEST_ENTRY = 100
_NUM_READS = 16
"""After this many reads even a coin-flip augmentation, from a generator that rankwise cannot seed, has changed."""

ON_PURPOSE = "compare_samples=False if the ranks' data differ on purpose"
SPLIT_ALIKE = (
    "use the same split on every rank: random_split(..., generator=torch.Generator().manual_seed(0)), or "
    "np.random.default_rng(0).permutation(n); else one rank's training samples are in another's validation set. "
    f"Pass {ON_PURPOSE}"
)
SORT = f"sort what os.listdir() or glob() returned: sorted(os.listdir(path)). Pass {ON_PURPOSE}"
SEED = (
    "seed the code that creates the dataset before it runs: np.random.seed(0), torch.manual_seed(0) or its own "
    "generator; sort what os.listdir() returned; or create it on one rank: rankwise.broadcast_object(data). "
    f"Pass {ON_PURPOSE}"
)
_NUM_SINGLE = 64
"""How many indices of an order are posted as they are; of the rest, digests of parts are posted."""
_NUM_ORDER_PARTS = 64


def check_with_peers(settings: Mapping[str, object], dataset: object = None, prober: Prober | None = None) -> None:
    """Raise on every rank if a setting or the data differs between ranks, or the dataset is empty.

    Called by: every rank, in the same order.

    Args:
        settings: ``dataset_length`` (``None`` if unknown) and other values that must be the same. JSON-able.
        dataset: its file names and indices are compared; ``None`` compares no data.
        prober: reads the samples to compare; ``None`` compares none.

    Raises:
        DatasetError: the dataset is empty, or differs between ranks.
        ConfigurationError: a setting differs.
    """
    world = current().world
    compares = world.world_size > 1 and bool(settings["dataset_length"])
    listings = _listings(dataset) if compares else []
    probes = prober.read(prober.indices()) if prober is not None and compares else None
    own = {
        "settings": dict(settings),
        "listings": {listing.label: listing.digest() for listing in listings},
        "samples": None if probes is None else digest_of_probes(probes),
    }
    reports = gather_json(own, what="comparing the settings of a loader or sampler")
    _check_settings([report["settings"] for report in reports])
    check_not_empty(settings["dataset_length"], where=f"reported on {world}", num_ranks=len(reports))
    if len({report["samples"] is None for report in reports}) > 1:
        prober = probes = None
    for label in reports[0]["listings"]:
        digests = [report["listings"].get(label) for report in reports]
        if None not in digests and len(set(digests)) > 1:
            _check_listing(next(one for one in listings if one.label == label), prober)
    if prober is not None and probes is not None and len({report["samples"] for report in reports}) > 1:
        _check_samples(prober, probes)


def _listings(dataset: object) -> list[Listing]:
    try:
        return listings_of(dataset)
    except Exception:  # noqa: BLE001 - a dataset's attributes may fail in any way; its samples are still compared
        return []


def _check_settings(reports: list[Mapping[str, object]]) -> None:
    # Of all ranks: one may have a sampler and the others none, and all raise the same error.
    for name in dict.fromkeys(name for report in reports for name in report):
        values = {rank: report.get(name) for rank, report in enumerate(reports)}
        if len(set(map(repr, values.values()))) > 1:
            raise (DatasetError if name == "dataset_length" else ConfigurationError)(
                f"{name} differs between ranks.",
                where=f"reported on {current().world}",
                evidence=fold_values({rank: f"{name}={value!r}" for rank, value in values.items()}),
                do="give every rank the same dataset: rankwise selects each rank's part itself"
                if name == "dataset_length"
                else f"pass the same {name} on every rank",
            )


def _check_listing(listing: Listing, prober: Prober | None) -> None:
    """Raise for the first entry that differs, unless its sample is the same on all ranks."""
    position = _first_difference(listing)
    if prober is not None and _is_same_sample(prober, position):
        return
    entries = gather_json(
        str(listing.entries[position]).replace("\n", " ")[-_LONGEST_ENTRY:], what="comparing an entry of a dataset"
    )
    is_split = listing.label == "dataset.indices"
    _raise(
        f"{listing.label}[{position}] differs between ranks: they "
        + ("split the dataset differently." if is_split else "list the files in different orders, or different files."),
        SPLIT_ALIKE if is_split else SORT,
        {rank: f"{listing.label}[{position}] = {entry}" for rank, entry in enumerate(entries)},
    )


def _first_difference(listing: Listing) -> int:
    """Return the first position at which the ranks' entries differ; they must differ."""
    low, high = 0, len(listing.entries)
    while high - low > 1:
        cuts = np.linspace(low, high, min(_NUM_PARTS, high - low) + 1).astype(int).tolist()
        digests = [listing.digest(start, stop) for start, stop in pairwise(cuts)]
        of_ranks = gather_json(digests, what="comparing parts of the list of a dataset")
        part = next((number for number, one in enumerate(zip(*of_ranks, strict=True)) if len(set(one)) > 1), 0)
        low, high = cuts[part], cuts[part + 1]
    return low


def _is_same_sample(prober: Prober, index: int) -> bool:
    """Return whether all ranks read the same sample for ``index``, whatever their lists contain."""
    (probe,) = prober.read([index])
    of_ranks = _gather_leaves(probe.leaves or [])
    if not all(leaves for _, leaves in of_ranks):
        return False
    return not any(_differs(path, of_ranks) for path in _paths(of_ranks))


def _check_samples(prober: Prober, probes: list[Probe]) -> None:
    """Raise for the first sample that differs, and differs again each time it is read."""
    own = {probe.sample_index: {leaf.path: leaf.digest for leaf in probe.leaves or ()} for probe in probes}
    of_ranks = gather_json(list(own.items()), what="comparing the digests of samples")
    unequal: list[tuple[int, list[str], set[str]]] = []
    for same_place in zip(*of_ranks, strict=True):
        digests: list[dict[str, str]] = [leaves for _, leaves in same_place if leaves]
        if len(digests) == len(of_ranks):
            paths = list(dict.fromkeys(path for leaves in digests for path in leaves))
            missing = {path for path in paths if any(path not in leaves for leaves in digests)}
            differing = [path for path in paths if len({leaves.get(path) for leaves in digests}) > 1]
            if differing:
                unequal.append((same_place[0][0], differing, missing))
    for index, paths, missing in unequal[:_MOST_SAMPLES]:
        (probe,) = prober.read([index], num_reads=_NUM_READS, paths=frozenset(paths))
        # Another worker process may read another value.
        same = [leaf for leaf in probe.leaves or () if own[index].get(leaf.path) == leaf.digest]
        leaves_of_rank = _gather_leaves(same)
        for path in paths:
            if _differs(path, leaves_of_rank, is_missing=path in missing):
                shown = {
                    rank: leaves[path].shown if path in leaves else "nothing"
                    for rank, (_, leaves) in enumerate(leaves_of_rank)
                }
                _raise(
                    f"dataset[{index}]{path} differs between ranks: they hold different data.",
                    SEED,
                    {rank: f"dataset[{index}]{path} = {value}" for rank, value in shown.items()},
                )


def _gather_leaves(leaves: list[Leaf]) -> list[tuple[int, dict[str, Leaf]]]:
    """Return the node and the leaves by path of each rank."""
    gathered: list[Any] = gather_json([current().world.node_rank, leaves], what="comparing a sample")
    return [
        (node, {leaf.path: leaf for leaf in (Leaf(*fields) for fields in fields_of_leaves)})
        for node, fields_of_leaves in gathered
    ]


def _paths(of_ranks: list[tuple[int, dict[str, Leaf]]]) -> list[str]:
    return list(dict.fromkeys(path for _, leaves in of_ranks for path in leaves))


def _differs(path: str, of_ranks: list[tuple[int, dict[str, Leaf]]], *, is_missing: bool = False) -> bool:
    """Return whether the ranks' values at ``path`` are different data.

    A leaf that a rank lacks was random, or ``is_missing``: its sample has no such value at all.
    """
    found = [(node, leaves[path]) for node, leaves in of_ranks if path in leaves]
    if len(found) < len(of_ranks):
        return is_missing and bool(found)
    first_node, first = found[0]
    first_of_node: dict[int, Leaf] = {}
    return any(
        unlike(first_of_node.setdefault(node, leaf), leaf, same_host=True)
        or unlike(first, leaf, same_host=node == first_node)
        for node, leaf in found
    )


def _raise(what: str, do: str, *evidence: Mapping[int, str], where: str | None = None) -> NoReturn:
    lines = [line for held in evidence for line in fold_values(held).splitlines()]
    more = [f"and {len(lines) - _MOST_LINES} more"] if len(lines) > _MOST_LINES else []
    text = "\n".join(lines[:_MOST_LINES] + more)
    raise DatasetError(what, where=where or f"reported on {current().world}", evidence=text, do=do)


def check_same_order(
    place: str,
    indices: npt.NDArray[np.int64],
    *,
    do: str,
    what: str = "The sampler gave the ranks different orders",
) -> None:
    """Raise unless a sampler's ``indices`` of an epoch are those of the first rank that reached ``place``.

    Raises:
        DatasetError: they are not; the first position that differs is named.
    """
    cuts = _cuts(len(indices))
    digests = [digest_of(np.ascontiguousarray(indices[start:stop]).data) for start, stop in pairwise(cuts)]
    head = indices[:_NUM_SINGLE].tolist()
    rank, (others, other_head) = _earlier(f"order/{place}", [digests, head])
    if others == digests:
        return
    differing = zip(others, digests, strict=False)
    start, stop = next(
        (cut for cut, (one, other) in zip(pairwise(cuts), differing, strict=False) if one != other), (0, 1)
    )
    where = f"position {start}" if stop - start == 1 else f"positions {start} to {stop - 1}"
    shown = slice(max(0, start - 1), start + 4) if start < _NUM_SINGLE else slice(0, 5)
    world = current().world
    _raise(
        f"{what}; the first difference is at {where} of the epoch.",
        do,
        {rank: f"positions from {shown.start}: {other_head[shown]}"},
        {world.rank: f"positions from {shown.start}: {head[shown]}"},
        where=str(world),
    )


def _cuts(length: int) -> list[int]:
    """Return where an order is cut for comparison: into single indices first, then into parts."""
    rest = np.linspace(min(_NUM_SINGLE, length), length, _NUM_ORDER_PARTS + 1).astype(int).tolist()
    return sorted({*range(min(_NUM_SINGLE, length)), *rest})


def check_same_block(place: str, described: str, node_rank: int) -> None:
    """Raise unless a stream's samples, as ``describe_block`` returned them, are those of the first rank at ``place``.

    Decoders may round differently on another node.

    Raises:
        DatasetError: they are not; the first sample that differs is named.
    """
    samples = json.loads(described)
    rank, (other_node_rank, other_samples) = _earlier(f"block/{place}", [node_rank, samples])
    same_host = other_node_rank == node_rank
    for index in samples:
        theirs = {leaf.path: leaf for leaf in (Leaf(*fields) for fields in other_samples.get(index, ()))}
        for leaf in (Leaf(*fields) for fields in samples[index]):
            other = theirs.get(leaf.path)
            if other is not None and unlike(other, leaf, same_host=same_host):
                label = f"sample {index} of the batch, {leaf.path}" if leaf.path else f"sample {index} of the batch"
                world = current().world
                _raise(
                    f"The stream gives the ranks different samples: {label} differs.",
                    "give every rank the whole stream: rankwise selects each rank's part, so the dataset must not "
                    "divide itself by rank (WebDataset: nodesplitter=lambda urls: urls); draw from random, "
                    "numpy.random or torch in __iter__ (seeded there, alike on every rank), and sort what "
                    f"os.listdir() returned. Pass {ON_PURPOSE}",
                    {rank: other.shown},
                    {world.rank: leaf.shown},
                    where=str(world),
                )


def _earlier(key: str, own: list[Any]) -> tuple[int, list[Any]]:
    """Post ``own`` unless another rank has; return that rank and its report, or this rank's own."""
    session = current_or_none()
    posted = None if session is None else Posted.of(session, "data")
    # If the store is lost the job is ending, for another reason.
    with suppress(StoreLost, TimeoutError):
        found = None if posted is None else posted.earlier(key, own)
        if found is not None:
            return found
    return -1, own


_NUM_SAMPLES = 4
"""Reading one may take long (a 3-D scan), and every construction of a loader pays for it."""
_NUM_ROWS = 256
"""Rows of tensors and arrays in memory cost microseconds."""


class Probe(NamedTuple):
    """The comparable values of one sample."""

    sample_index: int
    leaves: list[Leaf] | None
    """``None`` if it cannot be read."""


class Prober:
    """Reads samples of a loader's source in the process in which the loader would.

    If the loader has workers, a temporary worker process with their ``options`` reads: a file that the dataset opens at
    its first sample must not be open in the rank when the workers are forked from it.
    """

    def __init__(
        self,
        source: ColumnSource | SampleSource,
        options: WorkerOptions | None,
        where: str,
        stop_signals: tuple[str, ...] = (),
    ) -> None:
        self._source = source
        self._options = options
        self._where = where
        self._stop_signals = stop_signals

    def indices(self) -> list[int]:
        """Return which samples to compare: first, last, and evenly spaced ones between."""
        most = _NUM_ROWS if isinstance(self._source, ColumnSource) else _NUM_SAMPLES
        last = len(self._source) - 1
        return sorted(set(np.linspace(0, last, min(most, last + 1)).round().astype(int).tolist()))

    def read(self, indices: list[int], *, num_reads: int = 1, paths: frozenset[str] | None = None) -> list[Probe]:
        """Return the comparable values of samples, after reading each up to ``num_reads`` times.

        Values that differ between reads or have none of ``paths`` are left out. The process's generators are restored.
        """
        found = self._fetched(_Reading(self._source, num_reads, paths), indices)
        # The training loop's own workers will report it, where users look for it.
        return [Probe(index, None) for index in indices] if found is None else found

    def dims_of_samples(self) -> dict[str, int]:
        """Return the dim of each tensor in a batch that holds the samples, by the tensor's path; of no other one."""
        return self._fetched(_Growing(self._source), []) or {}

    def _fetched(self, reading: _Reading | _Growing, indices: list[int]) -> Any:
        """Return what ``reading`` fetches; ``None`` if the worker fails."""
        request = BatchRequest(0, 0, np.array(indices, dtype=np.int64), -1)
        if self._options is None:
            return reading.fetch(request)
        one = self._options._replace(num_workers=1, prefetch_factor=None, persistent_workers=False, pin_memory=False)
        try:
            (fetched,) = Workers(reading, one, self._where, self._stop_signals).read(iter([request]))
        except Exception:  # noqa: BLE001 - a worker may fail to start or to read in any way
            return None
        return fetched.batch


class _Reading:
    """A source for the workers, whose batches are probes."""

    def __init__(self, source: ColumnSource | SampleSource, num_reads: int, paths: frozenset[str] | None) -> None:
        self._source = source
        self._num_reads = num_reads
        self._paths = paths

    def __len__(self) -> int:
        return len(self._source)

    def fetch(self, request: BatchRequest) -> list[Probe]:
        return [self._probe(index) for index in request.indices.tolist()]

    def _probe(self, index: int) -> Probe:
        try:
            leaves = self._leaves(index)
            for _ in range(self._num_reads - 1):
                if not leaves:
                    break
                again = {leaf.path: leaf.digest for leaf in self._leaves(index)}
                leaves = [leaf for leaf in leaves if again.get(leaf.path) == leaf.digest]
        except Exception:  # noqa: BLE001 - a dataset may fail in any way, and does so again where users expect it
            return Probe(index, None)
        return Probe(index, leaves)

    def _leaves(self, index: int) -> list[Leaf]:
        leaves = self._all_leaves(index)
        return leaves if self._paths is None else [leaf for leaf in leaves if leaf.path in self._paths]

    def _all_leaves(self, index: int) -> list[Leaf]:
        if isinstance(self._source, SampleSource):
            return leaves_of(self._source.sample(index))
        row: npt.NDArray[np.int64] = np.array([index])
        return leaves_of(map_tensors(lambda tensor: tensor[0], self._source.fetch(BatchRequest(0, 0, row, -1))))


class _Growing:
    """A source for the workers, whose batch is what a second sample adds to a batch of one."""

    def __init__(self, source: ColumnSource | SampleSource) -> None:
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    def fetch(self, request: BatchRequest) -> dict[str, int]:
        """Return the dims that grow with a sample; none if a collate function fails on two equal samples."""
        del request
        try:
            return self._source.dims_of_samples() if isinstance(self._source, SampleSource) else {}
        except Exception:  # noqa: BLE001 - the dataset and the collate function are the user's
            return {}


def digest_of_probes(probes: list[Probe]) -> str:
    """Return a digest that is equal if everything in ``probes`` is."""
    return digest_of(*(leaf.digest.encode() for probe in probes for leaf in probe.leaves or ()))


def prober_in_memory(dataset: object, where: str) -> Prober | None:
    """Return a prober for rows of tensors and arrays; ``None`` for any other dataset."""
    try:
        columns = columns_of(dataset)
    except DatasetError:
        return None
    return None if columns is None else Prober(columns, None, where)
