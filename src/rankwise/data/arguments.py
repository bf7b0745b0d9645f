# SPDX-License-Identifier: Apache-2.0
"""The arguments that the loader rejects, and what to pass instead. Values only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from rankwise.data.workers import WorkerOptions

_TORCH_WORDS = {
    "batch_size": "pass global_batch_size (samples per step of all ranks together: the result does "
    "not depend on the number of ranks), or local_batch_size (samples per step of each rank)",
    "drop_last": 'pass remainder="drop" for drop_last=True, remainder="keep" for drop_last=False',
    "generator": "pass seed= instead",
    "timeout": "pass timeout_seconds=",
}


def refuse(unknown: dict[str, object]) -> None:
    """Raise for keywords that the loader does not have, naming what to use instead of torch's.

    Raises:
        ConfigurationError: ``unknown`` is not empty.
    """
    for name in unknown:
        if name in _TORCH_WORDS:
            raise ConfigurationError(f"rankwise.DataLoader does not support {name}=.", do=_TORCH_WORDS[name])
    if unknown:
        names = ", ".join(unknown)
        raise ConfigurationError(
            f"rankwise.DataLoader has no argument {names}.",
            do="use one of global_batch_size, local_batch_size, shuffle, sampler, batch_sampler, seed, remainder, "
            "num_workers, collate_fn, pin_memory, prefetch_factor, persistent_workers, device, "
            "worker_init_fn, multiprocessing_context, timeout_seconds, compare_samples",
        )


def check_batches(dataset: object, *, is_stream: bool, is_ready: bool, batch_sampler: object, **others: object) -> None:
    """Raise if batches are formed in two ways.

    Args:
        dataset: for the error.
        is_stream: whether the dataset can only be iterated.
        is_ready: whether it returns batches.
        batch_sampler: as the loader was given it.
        others: further arguments that form batches; false ones were not given.

    Raises:
        ConfigurationError: see above.
    """
    if batch_sampler is not None and is_stream:
        raise ConfigurationError(
            f"batch_sampler= needs a dataset that can be indexed, but a {type(dataset).__name__} can only be iterated.",
            do="leave batch_sampler= out, or make the dataset map-style",
        )
    ways = ["batch_sampler="] * (batch_sampler is not None) + ["batch_size=None"] * is_ready
    ways += [f"{name}=" for name, given in others.items() if given and ways]
    if len(ways) > 1:
        raise ConfigurationError(
            f"{ways[0]} was given together with {', '.join(ways[1:])}, but it determines the batches alone.",
            do=f"pass {ways[0]} without {', '.join(ways[1:])}",
        )


def check_workers(options: WorkerOptions) -> None:
    """Raise for invalid options of worker processes, and for those that need workers if there are none.

    Raises:
        ConfigurationError: see above.
    """
    if options.num_workers < 0:
        raise ConfigurationError(
            f"num_workers must be at least 0, got {options.num_workers}.",
            do="pass 0 to read in this process, or a positive number",
        )
    for name in ("prefetch_factor", "persistent_workers", "worker_init_fn"):
        if getattr(options, name) and options.num_workers == 0:
            raise ConfigurationError(
                f"{name} is for worker processes, but num_workers=0.",
                do="pass num_workers=1 or more, or leave it out",
            )


def check_order(dataset: object, *, is_stream: bool, shuffle: bool, sampler: object) -> None:
    """Raise if the order of an epoch is given twice, or is given for a dataset that can only be iterated.

    Raises:
        ConfigurationError: see above.
    """
    if sampler is not None and shuffle:
        raise ConfigurationError(
            "Both shuffle=True and sampler= were given, and each decides the order of an epoch.",
            do="pass one of them",
        )
    if is_stream and sampler is not None:
        raise ConfigurationError(
            f"sampler= needs a dataset that can be indexed, but a {type(dataset).__name__} can only be iterated.",
            do="leave sampler= out, or make the dataset map-style",
        )
    if is_stream and shuffle:
        raise ConfigurationError(
            f"shuffle=True needs a dataset that can be indexed, but a {type(dataset).__name__} can only be iterated.",
            do="shuffle inside the dataset's __iter__ (its generators are seeded the same on "
            "every rank), or make the dataset map-style",
        )
