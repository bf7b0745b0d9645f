# SPDX-License-Identifier: Apache-2.0
"""What the terms of a loss average over: sizes recorded in forward, saved by reductions, or read from the graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch.nn import functional

from rankwise.parallel.loss.terms import ForwardCall, LossReader, mark_output

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankwise.parallel.loss.terms import Term


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
