# SPDX-License-Identifier: Apache-2.0
"""What ranks' reports of a loss amount to together."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest
import torch

from rankwise.replicate.loss.reports import REPORT_LENGTH, GlobalLoss, LossVerdict, Mode, combine, report_of, verdict_of
from rankwise.replicate.loss.terms import Term

if TYPE_CHECKING:
    from torch.autograd.graph import Node

NODE = cast("Node", torch.ones(1, requires_grad=True).sum().grad_fn)


def mean(amount: float = 4.0) -> Term:
    return Term("mean", "MseLoss", NODE, amount=amount, num_rows=2)


def total(divisor: float = 0.0, *, num_rows: int = 2, is_share: bool = False, is_odd: bool = False) -> Term:
    return Term(
        "sum",
        "Sum",
        NODE,
        divisor or 1.0,
        num_rows,
        divisor,
        is_share,
        is_odd=is_odd,
        has_constants=divisor > 0 or is_odd,
    )


def combined(*verdicts: LossVerdict) -> GlobalLoss:
    reports = [report + [0.0] * (REPORT_LENGTH - len(report)) for report in map(report_of, verdicts)]
    return combine([sum(numbers) for numbers in zip(*reports, strict=True)])


@pytest.mark.parametrize(
    ("terms", "mode"),
    [
        ([mean()], Mode.MEAN),
        ([mean(), Term("same", "Norm", NODE)], Mode.MEAN),
        ([total(), total()], Mode.SUM),
        ([total(), Term("same", "Norm", NODE)], Mode.TERMS),
        ([total(8.0)], Mode.TERMS),
        ([mean(), total()], Mode.TERMS),
        ([mean(), mean()], Mode.TERMS),
        ([mean(), Term("unknown", "Sqrt", NODE)], Mode.SAMPLES),
        ([Term("same", "Norm", NODE)], Mode.SAMPLES),
        ([total(8.0)] * 13, Mode.SAMPLES),
        ([], Mode.SAMPLES),
    ],
)
def test_operations_decide_the_mode(terms: list[Term], mode: Mode) -> None:
    assert verdict_of(terms).mode is mode


@pytest.mark.parametrize(
    ("of_ranks", "reading"),
    [
        ([total(2.0, is_share=True), total(1.0, num_rows=1, is_share=True)], "share"),
        ([total(2.0, is_share=True), total(2.0, is_share=True)], "share"),
        ([total(100.0), total(100.0)], "constant"),
        ([total(2.0, is_share=True), total(2.0, num_rows=1)], "constant"),
        ([total(4.0, is_share=True), total(4.0, is_share=True)], "both"),
        ([total(is_odd=True), total()], "both"),
        ([total(16.0), total(8.0)], "share"),
    ],
)
def test_a_sum_over_a_number_is_read_by_all_ranks_numbers(of_ranks: list[Term], reading: str) -> None:
    loss = combined(*(LossVerdict(Mode.TERMS, (one,)) for one in of_ranks))
    assert [term.reading for term in loss.terms] == [reading]


def test_ranks_without_samples_leave_the_others_as_they_are() -> None:
    nothing, several = LossVerdict(Mode.NOTHING), LossVerdict(Mode.TERMS, (mean(4.0), total()))
    with_nothing, without = combined(several, nothing, several), combined(several, several)
    assert with_nothing == without
    assert with_nothing.num_active == 2
    assert [term.amount for term in with_nothing.terms] == [8.0, 2.0]
    assert combined(nothing, nothing).mode is Mode.NOTHING


@pytest.mark.parametrize(
    "other",
    [
        LossVerdict(Mode.SUM, (total(),)),
        LossVerdict(Mode.SAMPLES),
        LossVerdict(Mode.TERMS, (mean(),)),
        LossVerdict(Mode.TERMS, (total(), mean())),
    ],
)
def test_losses_of_other_kinds_are_unlike(other: LossVerdict) -> None:
    own = LossVerdict(Mode.TERMS, (mean(), total()))
    assert combined(own, own).is_alike
    assert not combined(own, other, own).is_alike
