# SPDX-License-Identifier: Apache-2.0
"""The actions of torch's pipeline schedules, and backward in two parts. Imports them, which takes long, when called."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch
    from torch import nn

BACKWARD_OF_INPUTS = "stage_backward_input() of torch.distributed.pipelining as of that release"
"""A backward in two parts needs this: before torch 2.13 it fails if a stage passes on a value it does not use."""


def forward_action(stage: int, micro_batch: int) -> Any:
    """Return the action that is a forward."""
    from torch.distributed.pipelining.schedules import _Action, _ComputationType  # noqa: PLC0415 - takes long

    return _Action(stage, _ComputationType.FORWARD, micro_batch)


def backward_action(stage: int, micro_batch: int) -> Any:
    """Return the action that is a whole backward."""
    from torch.distributed.pipelining.schedules import _Action, _ComputationType  # noqa: PLC0415 - takes long

    return _Action(stage, _ComputationType.FULL_BACKWARD, micro_batch)


def read_action(action: Any) -> tuple[str, int, int]:
    """Return the kind of an action in torch's letters (F, B, I, W, SEND_F, ...), its stage and its micro-batch."""
    return action.computation_type.value, action.stage_index, action.microbatch_index


def with_sends(
    order: dict[int, list[Any]], *, stage_to_rank: Callable[[int], int], num_stages: int
) -> dict[int, list[Any]]:
    """Return each rank's actions with sends and receives inserted where they are safe."""
    from torch.distributed.pipelining.schedules import _add_send_recv  # noqa: PLC0415 - takes long

    return _add_send_recv(order, stage_to_rank=stage_to_rank, num_stages=num_stages)


def backward_of_inputs(
    roots: list[torch.Tensor],
    gradients: list[torch.Tensor] | None,
    inputs: list[torch.Tensor],
    weights: Iterator[nn.Parameter],
) -> tuple[Sequence[torch.Tensor | None], list[dict[str, Any]]]:
    """Return the gradients of inputs, and what :func:`backward_of_weights` needs."""
    from torch.distributed.pipelining._backward import stage_backward_input  # noqa: PLC0415 - takes long

    return stage_backward_input(roots, gradients, inputs, weights)


def backward_of_weights(weights: Iterator[nn.Parameter], groups: list[dict[str, Any]]) -> None:
    """Add the remaining gradients of weights after :func:`backward_of_inputs`."""
    from torch.distributed.pipelining._backward import stage_backward_weight  # noqa: PLC0415 - takes long

    stage_backward_weight(weights, groups)
