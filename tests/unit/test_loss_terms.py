# SPDX-License-Identifier: Apache-2.0
"""What the terms of a loss average over: sizes recorded in forward, saved by reductions, or read from the graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch.nn import functional

from rankwise.replicate.loss.graph import ForwardCall, mark_output
from rankwise.replicate.loss.terms import LossReader

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.replicate.loss.terms import Term


def outputs() -> tuple[torch.Tensor, ...]:
    """Return two outputs of one node, [4, 2] and [4, 3], marked as what a model gave."""
    both = torch.ones(4, 5, requires_grad=True).split([2, 3], 1)
    mark_output(both, ForwardCall(0, 4.0))
    return both


def only_term(loss: torch.Tensor) -> Term:
    reader = LossReader(())
    reader.read(loss)
    (term,) = reader.terms
    return term


@pytest.mark.parametrize(("number", "size"), [(0, 8), (1, 12)])
@pytest.mark.parametrize(
    "loss",
    [
        lambda output: functional.mse_loss(output, torch.zeros_like(output)),
        lambda output: output.mean(),
        lambda output: output.exp().mean(),
        lambda output: output.mean(1).mean(0),
    ],
    ids=["of a loss function", "of the output", "of what follows", "in two steps"],
)
def test_a_mean_is_over_the_elements_of_one_output(
    number: int, size: int, loss: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    term = only_term(loss(outputs()[number]))
    assert (term.kind, term.amount, term.num_rows, term.per_row) == ("mean", size, 4, size // 4)


def test_samples_are_known_of_a_sum_whose_dims_are_kept() -> None:
    term = only_term(outputs()[1].sum(0, keepdim=True).sum() / 4)
    assert (term.kind, term.num_rows, term.is_share) == ("sum", 4, True)


def test_views_beside_an_output_do_not_lead_to_it() -> None:
    _, output = outputs()
    parameter = torch.ones(3, requires_grad=True)
    term = only_term(0.5 * (output.exp().square().mean() + parameter.exp().square().mean()))
    assert (term.kind, term.num_rows) == ("mean", 4)


_LABELS = torch.tensor([0, 1, -100, 2])


@pytest.mark.parametrize(
    "loss",
    [
        lambda output: functional.mse_loss(output, torch.zeros_like(output)),
        lambda output: functional.mse_loss(output, torch.zeros_like(output), reduction="sum"),
        lambda output: functional.nll_loss(output, _LABELS),
        lambda output: functional.nll_loss(output, _LABELS, weight=torch.tensor([0.5, 2.0, 3.0])),
        lambda output: functional.nll_loss(output, torch.full((4,), -100)),
        lambda output: functional.nll_loss(output, _LABELS, reduction="sum"),
        lambda output: functional.binary_cross_entropy(output, torch.zeros_like(output), torch.ones(3)),
        lambda output: functional.mse_loss(output[:0], torch.zeros(0, 3)),
        lambda output: functional.smooth_l1_loss(output, 2 * output),
        lambda output: functional.mse_loss(output, torch.ones(3, requires_grad=True).expand(4, 3)),
        lambda output: functional.l1_loss(output, torch.zeros_like(output), reduction="none"),
    ],
)
def test_a_loss_function_that_is_read_at_once_is_read_as_any_other(
    loss: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = loss(outputs()[1])
    at_once, step_by_step = LossReader(()), LossReader(())
    at_once.read(root)
    monkeypatch.setattr(LossReader, "_read_at_once", lambda *_: False)
    step_by_step.read(root)
    for one in (at_once, step_by_step):
        assert one.terms
    assert at_once.terms == step_by_step.terms
    assert (at_once.calls, at_once.unlike, at_once.has_others, at_once.is_empty) == (
        step_by_step.calls,
        step_by_step.unlike,
        step_by_step.has_others,
        step_by_step.is_empty,
    )
