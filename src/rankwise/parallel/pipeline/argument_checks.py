# SPDX-License-Identifier: Apache-2.0
"""What is asked of the arguments of a pipeline before anything is changed. Used by pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from rankwise.errors import ConfigurationError
from rankwise.torch_private.dtensor import own_part

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from rankwise.parallel.pipeline.schedule import PipelineSchedule
    from rankwise.world.mesh import Axes


def check_functions(loss_fn: object, weight: object) -> None:
    """Raise if what is to be called cannot be.

    Raises:
        ConfigurationError: says which.
    """
    if not callable(loss_fn):
        raise ConfigurationError(
            f"loss_fn must be a function, not {loss_fn!r}.",
            do="pass loss_fn(output, target), which returns a mean or a sum",
        )
    if weight is not None and not callable(weight):
        raise ConfigurationError(
            f"weight must be a function, not {weight!r}.",
            do="pass weight(target), which returns a number: lambda y: (y != -100).sum()",
        )


def checked_split(split: object) -> list[str] | None:
    """Return the names of modules that stages begin with; one name may stand alone.

    Raises:
        ConfigurationError: they are no names.
    """
    if split is None:
        return None
    names = list(cast("Sequence[object]", split)) if isinstance(split, list | tuple) else [split]
    if wrong := [name for name in names if not isinstance(name, str)]:
        raise ConfigurationError(
            f"split must be names of modules, not {wrong[0]!r}.", do='pass split=["layers.8"], the first of each stage'
        )
    return cast("list[str]", names)


def check_axes(axes: Axes, model: nn.Module) -> None:
    """Raise if the ranks lie along an axis that a pipeline does not go with, or that the model is not split along.

    Raises:
        ConfigurationError: names the nearest sizes.
    """
    islands = f"islands={axes.islands}, " if axes.islands > 1 else ""
    if axes.dp_shard > 1:
        raise ConfigurationError(
            f"pipeline() does not shard its stages, but the mesh has dp_shard={axes.dp_shard}.",
            evidence=f"mesh: {axes}",
            do=f"rankwise.mesh({islands}pp={axes.pp}, dp_replicate={axes.data_ranks_per_island}, tp={axes.tp}), "
            "or rankwise.shard() without pp",
        )
    if axes.tp > 1 and all(own_part(parameter) is parameter for parameter in model.parameters()):
        raise ConfigurationError(
            f"The mesh has tp={axes.tp}, but the model is not split along tp.",
            evidence=f"mesh: {axes}",
            do="call rankwise.tensor_parallel(model) first, or "
            f"rankwise.mesh({islands}pp={axes.pp}, dp_replicate={axes.dp_replicate * axes.tp})",
        )


def checked_count(micro_batches: int | None, schedule: PipelineSchedule, num_ranks: int) -> int:
    """Return how many micro-batches a batch is run in: what was asked for, or one per stage.

    Raises:
        ConfigurationError: the schedule cannot run so many.
    """
    count = schedule.num_stages(num_ranks) if micro_batches is None else micro_batches
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ConfigurationError(f"micro_batches must be an integer of at least 1, got {count!r}.", do="pass 4")
    if not schedule.allows(count, num_ranks):
        near = [number for number in range(1, 2 * count) if schedule.allows(number, num_ranks)]
        near.sort(key=lambda number: (abs(number - count), number))
        raise ConfigurationError(
            f"{schedule.name} on {num_ranks} ranks cannot run {count} micro-batches.",
            evidence=f"it runs them in rounds of equal length, each of at least {num_ranks}",
            do=f"pass micro_batches={near[0]} or {near[1]}",
        )
    return count
