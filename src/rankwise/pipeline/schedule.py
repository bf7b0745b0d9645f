# SPDX-License-Identifier: Apache-2.0
"""The order in which each rank of a pipeline computes, sends and receives: torch's schedules, as lists of actions.

Pure: a name and numbers in, actions out. Used by pipeline.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

from torch import nn

from rankwise.errors import ConfigurationError
from rankwise.torch_private.autograd import (
    BACKWARD_OF_INPUTS,
    backward_action,
    forward_action,
    read_action,
    with_sends,
)
from rankwise.world import torch_versions

FORWARD = "forward"
BACKWARD = "backward"
BACKWARD_INPUT = "backward of inputs"
BACKWARD_WEIGHT = "backward of weights"
SEND_FORWARD = "send forward"
RECEIVE_FORWARD = "receive forward"
SEND_BACKWARD = "send backward"
RECEIVE_BACKWARD = "receive backward"

COMPUTING = (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)

_KIND_OF = {
    "F": FORWARD,
    "B": BACKWARD,
    "I": BACKWARD_INPUT,
    "W": BACKWARD_WEIGHT,
    "SEND_F": SEND_FORWARD,
    "RECV_F": RECEIVE_FORWARD,
    "SEND_B": SEND_BACKWARD,
    "RECV_B": RECEIVE_BACKWARD,
}


@dataclass(frozen=True, slots=True)
class Action:
    """One operation of a rank in a step."""

    kind: str
    stage: int
    micro_batch: int

    @property
    def computes(self) -> bool:
        """Whether it is a forward or a backward."""
        return self.kind in COMPUTING


@dataclass(frozen=True, slots=True)
class PipelineSchedule:
    """An order of forwards and backwards."""

    name: str
    torch_name: str
    stages_per_rank: int = 1
    is_v: bool = False
    """Whether the order of ranks is reversed for every other round of stages."""

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of inputs and of weights are computed separately."""
        return "ZeroBubble" in self.torch_name

    def num_stages(self, num_ranks: int) -> int:
        """Return the number of stages on ``num_ranks`` ranks."""
        return self.stages_per_rank * num_ranks

    def rank_of(self, stage: int, num_ranks: int) -> int:
        """Return which rank has a stage."""
        turn, place = divmod(stage, num_ranks)
        return num_ranks - 1 - place if self.is_v and turn % 2 else place

    def allows(self, num_micro_batches: int, num_ranks: int) -> bool:
        """Return whether a step can have so many micro-batches."""
        if num_micro_batches < 1:
            return False
        if not self.torch_name.startswith("Interleaved"):
            return True
        # Rounds of at least one micro-batch per rank must be of equal length.
        return num_micro_batches % max(1, num_micro_batches // num_ranks) == 0

    def most(self, limit: int, num_ranks: int) -> int:
        """Return the largest allowed number of micro-batches up to ``limit``."""
        return next(number for number in range(limit, 0, -1) if self.allows(number, num_ranks))


SCHEDULES = {
    schedule.name: schedule
    for schedule in (
        PipelineSchedule("gpipe", "GPipe"),
        PipelineSchedule("1f1b", "1F1B"),
        PipelineSchedule("interleaved_1f1b", "Interleaved1F1B", stages_per_rank=2),
        PipelineSchedule("interleaved_zero_bubble", "InterleavedZeroBubble", stages_per_rank=2),
        PipelineSchedule("zbv_zero_bubble", "ZBVZeroBubble", stages_per_rank=2, is_v=True),
    )
}


def schedule_of(name: str) -> PipelineSchedule:
    """Return the schedule of a name.

    Raises:
        ConfigurationError: there is none.
        TorchTooOld: this version of torch cannot run it.
    """
    if name in SCHEDULES:
        if SCHEDULES[name].splits_backward and not torch_versions.is_at_least((2, 13)):
            raise torch_versions.lacks(BACKWARD_OF_INPUTS, (2, 13), f"The schedule {name}")
        return SCHEDULES[name]
    near = difflib.get_close_matches(str(name).lower(), SCHEDULES, n=1, cutoff=0.4)
    raise ConfigurationError(
        f"Unknown schedule {name!r} of pipeline().",
        evidence=f"it knows {', '.join(SCHEDULES)}",
        do=f'pass schedule="{near[0] if near else "1f1b"}"',
    )


@cache
def training_order(name: str, num_ranks: int, num_micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """Return what each rank does in a step, with sends and receives where they are safe.

    Source: the schedules of torch.distributed.pipelining; GPipe (Huang et al., 2019), 1F1B (Narayanan et al.,
        "PipeDream", 2019), interleaved (Narayanan et al., "Efficient Large-Scale Language Model Training", 2021),
        zero bubble (Qi et al., "Zero Bubble Pipeline Parallelism", 2023).
    """
    from torch.distributed.pipelining import schedules  # noqa: PLC0415 - takes long to import

    schedule = SCHEDULES[name]
    num_stages = schedule.num_stages(num_ranks)
    stages: list[Any] = [
        SimpleNamespace(
            stage_index=index * num_ranks,
            num_stages=num_stages,
            group_size=num_ranks,
            group_rank=0,
            submod=nn.Identity(),
            stage_index_to_group_rank={},
        )
        for index in range(schedule.stages_per_rank)
    ]
    if name == "1f1b":
        order: Any = {rank: _one_forward_one_backward(rank, num_stages, num_micro_batches) for rank in range(num_ranks)}
    elif schedule.stages_per_rank == 1:
        order = schedules.ScheduleGPipe(stages[0], num_micro_batches).pipeline_order
    else:
        multi: Any = schedules.get_schedule_class(schedule.torch_name)
        order = multi(stages, num_micro_batches).pipeline_order
    return _with_sends(schedule, num_ranks, order)


def _one_forward_one_backward(stage: int, num_stages: int, num_micro_batches: int) -> list[Any]:
    """Return the order of Schedule1F1B, whose own list of actions leaves out the last stage's first forward."""
    num_ahead = min(num_micro_batches, num_stages - stage)
    actions = [forward_action(stage, number) for number in range(num_ahead)]
    for number in range(num_micro_batches):
        actions.append(backward_action(stage, number))
        if number + num_ahead < num_micro_batches:
            actions.append(forward_action(stage, number + num_ahead))
    return actions


@cache
def predicting_order(name: str, num_ranks: int, num_micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """Return what each rank does when there is no backward."""
    schedule = SCHEDULES[name]
    num_stages = schedule.num_stages(num_ranks)
    order = {
        rank: [
            forward_action(stage, micro_batch)
            for stage in range(num_stages)
            if schedule.rank_of(stage, num_ranks) == rank
            for micro_batch in range(num_micro_batches)
        ]
        for rank in range(num_ranks)
    }
    return _with_sends(schedule, num_ranks, order)


def _with_sends(schedule: PipelineSchedule, num_ranks: int, order: dict[int, Any]) -> tuple[tuple[Action, ...], ...]:
    # None stands for waiting.
    computing = {
        rank: [one for one in actions if one is not None and _KIND_OF.get(read_action(one)[0]) in COMPUTING]
        for rank, actions in order.items()
    }
    whole = with_sends(
        computing,
        stage_to_rank=lambda stage: schedule.rank_of(stage, num_ranks),
        num_stages=schedule.num_stages(num_ranks),
    )
    return tuple(
        tuple(Action(_KIND_OF[kind], stage, number) for kind, stage, number in map(read_action, whole[rank]))
        for rank in range(num_ranks)
    )
