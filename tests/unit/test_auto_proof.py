# SPDX-License-Identifier: Apache-2.0
"""What forbids splitting a call of a module, where the rows of its batch lie, and whether results are the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from rankwise.auto.proof import (
    Reason,
    agree,
    batch_dims,
    copy_of,
    difference,
    difference_beside,
    elsewhere,
    gradient_elsewhere,
    obstacle,
    obstacle_after,
    parameters_of,
    tensors_kept,
)
from rankwise.auto.rows import OutputRows, Share
from rankwise.replicate.random_numbers.sample_layout import SampleLayout


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("num_global", [4, 5, 17])
def test_shares_cover_a_batch_once_and_differ_by_one_row_at_most(num_global: int, num_ranks: int) -> None:
    shares = [Share(rank, num_ranks, num_global) for rank in range(num_ranks)]
    rows = [row for share in shares for row in range(share.start, share.start + share.num)]
    assert rows == list(range(num_global))
    assert max(share.num for share in shares) - min(share.num for share in shares) <= 1
    assert shares[0].num == max(share.num for share in shares)


def _dims(leaves: list[Any], num_ranks: int = 2) -> list[tuple[int, tuple[int | None, ...]]]:
    return [(one.num_global, one.dims) for one in batch_dims(leaves, num_ranks)]


def test_rows_are_first_looked_for_in_the_first_dim_of_the_first_tensor() -> None:
    assert _dims([torch.zeros(7, 3), torch.zeros(7), 0.1, torch.zeros(3, 3)])[0] == (7, (0, 0, None, None))


def test_a_state_with_the_batch_in_its_second_dim_is_split_there() -> None:
    assert _dims([torch.zeros(7, 9), torch.zeros(2, 7, 5)])[0] == (7, (0, 1))


def test_a_batch_in_the_second_dim_is_tried_too() -> None:
    assert (5, (1, 0)) in _dims([torch.zeros(9, 5, 3), torch.zeros(5, 9)])


def test_a_mask_as_long_as_the_batch_is_also_tried_whole() -> None:
    assert (8, (0, None)) in _dims([torch.zeros(8, 8, 4), torch.zeros(8, 8)])


def test_only_batches_with_a_row_for_each_rank_count() -> None:
    assert _dims([torch.zeros(1, 1)]) == []
    assert _dims([3, "words"]) == []
    assert _dims([torch.zeros(())]) == []


def _with_hook(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda *_: None)
    return nn.Sequential(module)


@pytest.mark.parametrize(
    ("module", "leaves", "expected"),
    [
        (nn.Linear(2, 2), [torch.zeros(3, 2), object()], "it takes a object, whose rows are unknown"),
        (nn.Linear(2, 2), [torch.zeros(3, 2).to_sparse()], "it takes a sparse tensor"),
        (nn.Sequential(nn.Embedding(3, 2, sparse=True)), [torch.zeros(3)], "its part 0 has sparse gradients"),
        (_with_hook(nn.Linear(2, 2)), [torch.zeros(3, 2)], "its part 0 has hooks, which would see a part of the batch"),
        (parametrizations.spectral_norm(nn.Linear(2, 2)), [torch.zeros(3, 2)], None),
        (nn.utils.spectral_norm(nn.Linear(2, 2)), [torch.zeros(3, 2), True, None, 1.5, "x"], None),
    ],
    ids=["object", "sparse input", "sparse gradients", "hook", "parametrized", "torch's own hook"],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*")
def test_obstacles_are_named(module: nn.Module, leaves: list[Any], expected: str | None) -> None:
    assert obstacle(module, leaves) == expected


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_module_compiled_by_jit_is_not_split() -> None:
    scripted = torch.jit.script(nn.Linear(2, 2))
    assert obstacle(nn.Sequential(scripted), [torch.zeros(3, 2)]) == "its part 0 is compiled by torch.jit"


class _Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.features: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.features.append(x)
        return x


def test_tensors_kept_in_attributes_are_found() -> None:
    module = nn.Sequential(_Keeps())
    assert tensors_kept(module) == []
    x = torch.zeros(3, 2)
    module(x)
    assert tensors_kept(module) == [("0.features", x)]


@pytest.mark.parametrize(
    ("module", "facts", "expected"),
    [
        (nn.BatchNorm1d(2), {"checkpoints": [False]}, "it uses torch.utils.checkpoint around BatchNorm"),
        (nn.BatchNorm1d(2).eval(), {"checkpoints": [False]}, None),
        (nn.Linear(2, 2), {"checkpoints": [False, True]}, "it uses torch.utils.checkpoint with use_reentrant=True"),
        (nn.Linear(2, 2), {"changes_arguments": True}, "it changes its arguments"),
        (nn.Linear(2, 2), {"changes_parameters": True}, "it changes its parameters in forward"),
        (nn.Linear(2, 2), {"is_random": True}, None),
        (nn.BatchNorm1d(2), {}, None),
    ],
)
def test_what_a_whole_call_did_can_forbid_splitting(
    module: nn.Module, facts: dict[str, Any], expected: str | None
) -> None:
    none: dict[str, Any] = {
        "checkpoints": [],
        "changes_arguments": False,
        "changes_parameters": False,
        "is_random": False,
    }
    reason = obstacle_after(module, **(none | facts))
    assert (None if reason is None else reason.text) == expected


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_compiled_modules_are_split_only_without_what_is_replaced_in_python() -> None:
    facts = {"changes_arguments": False, "changes_parameters": False}
    compiled, normed = (cast("nn.Module", torch.compile(one)) for one in (nn.Linear(2, 2), nn.BatchNorm1d(2)))
    assert obstacle(compiled, [torch.zeros(3, 2)]) is None
    assert obstacle_after(compiled, [], **facts, is_random=False) is None
    expected = "it is compiled, with BatchNorm or random numbers in it"
    assert obstacle_after(compiled, [], **facts, is_random=True) == Reason(expected)
    assert obstacle_after(normed, [], **facts, is_random=False) == Reason(expected)
    assert obstacle(nn.Sequential(compiled), [torch.zeros(3, 2)]) == "a part of it is compiled by torch.compile"


def test_a_copy_shares_parameters_and_nothing_else() -> None:
    module = nn.Sequential(_Keeps(), nn.BatchNorm1d(2))
    copy = copy_of(module)
    assert all(one is other for one, other in zip(parameters_of(module), parameters_of(copy), strict=True))
    copy(torch.arange(6.0).view(3, 2))
    assert cast("_Keeps", module[0]).features == []
    assert difference_beside(module, copy) == Reason("its buffers depend on the rows", is_wrong=True)
    module(torch.arange(6.0).view(3, 2))
    assert difference_beside(module, copy) is None


def _not_followed(_: torch.Tensor) -> None:
    return None


def test_rows_of_outputs_are_found_by_their_shapes_and_compared() -> None:
    share = Share(1, 2, 5)
    rows_first, rows_second = torch.arange(10.0).view(5, 2), torch.arange(20).view(2, 5, 2)
    whole = [rows_first, rows_second, "words", torch.ones(3)]
    own = [rows_first[3:], rows_second[:, 3:], "words", torch.ones(3)]
    rows = (OutputRows(SampleLayout(0), (0, 1)), OutputRows(SampleLayout(1), (0, 1, 2)), None, None)
    assert difference(whole, own, share, _not_followed) == (None, rows)
    transposed = [rows_first.T.contiguous().T], [rows_first[3:]]
    assert difference(*transposed, share, _not_followed) == (None, (OutputRows(SampleLayout(0), (1, 0)),))


@pytest.mark.parametrize("layout", [SampleLayout(0, inner=3), SampleLayout(0, outer=3)], ids=["inner", "outer"])
def test_rows_flattened_with_another_dim_are_where_they_were_followed_to(layout: SampleLayout) -> None:
    whole = torch.arange(30.0).view(15, 2)
    by_row = whole.view(5, 3, 2) if layout.inner == 3 else whole.view(3, 5, 2)
    own = (by_row[3:] if layout.inner == 3 else by_row[:, 3:]).reshape(6, 2)
    found = difference([whole], [own], Share(1, 2, 5), lambda _: layout)
    assert found == (None, (OutputRows(layout, (0, 1)),))
    reason, _ = difference([whole], [own.flip(0)], Share(1, 2, 5), lambda _: layout)
    assert reason is not None
    assert reason.text.startswith("the output depends on the rest of the batch")


def test_a_layout_that_does_not_fit_the_shapes_is_not_believed() -> None:
    whole = torch.arange(10.0).view(5, 2)
    assert difference([whole], [whole[3:]], Share(1, 2, 5), lambda _: SampleLayout(1)) == (
        None,
        (OutputRows(SampleLayout(0), (0, 1)),),
    )


@dataclass
class _Output:
    value: int


@pytest.mark.parametrize(
    ("whole", "own", "expected"),
    [
        (
            torch.ones(5, 2),
            torch.ones(2, 2) * 1.1,
            "the output depends on the rest of the batch (compared on 2 of 5 rows)",
        ),
        (torch.ones(()), torch.ones(()) * 2, "the output depends on the rest of the batch (compared on 2 of 5 rows)"),
        (torch.ones(5, 5), torch.ones(2, 2), "the output is [5, 5] for the whole batch and [2, 2] for 2 rows"),
        (torch.ones(10), torch.ones(4), "the output is [10] for the whole batch and [4] for 2 rows"),
        (torch.ones(5, 1), torch.ones(2), "the output has no rows"),
        (5, 2, "the output depends on the number of rows"),
        (_Output(1), _Output(1), "it returns a _Output, whose rows are unknown"),
    ],
    ids=["values", "scalar", "pairs", "multiple", "dims", "number", "object"],
)
def test_a_difference_of_outputs_is_named(whole: object, own: object, expected: str) -> None:
    reason, places = difference([whole], [own], Share(1, 2, 5), _not_followed)
    assert reason is not None
    assert (reason.text, places) == (expected, ())
    # Earlier calls, whose outputs fitted together, may have been wrong in values only.
    assert reason.is_wrong == expected.startswith(("samples see", "the output depends"))


def test_rows_of_other_ranks_are_compared_too() -> None:
    whole = torch.arange(6.0).view(3, 2)
    assert elsewhere([whole, "word"], [whole + 1e-7, "word"]) is None
    for wrong in (whole.flip(0), whole[:2]):
        reason = elsewhere([whole], [wrong])
        assert reason is not None
        assert reason.is_wrong


def test_a_trained_tensor_of_no_module_forbids_splitting() -> None:
    module, prompt = nn.Linear(2, 2), nn.Parameter(torch.ones(2))
    x = torch.ones(3, 2, requires_grad=True)
    assert gradient_elsewhere(module, [x], module(x).tanh()) is None
    hidden = x.exp()
    assert gradient_elsewhere(module, [hidden], {"out": [module(hidden), 3]}) is None
    assert gradient_elsewhere(module, [x], module(x + prompt)) == Reason(
        "it computes gradients of a tensor that is none of its parameters", is_wrong=True
    )
    assert gradient_elsewhere(module, [x, prompt], module(x + prompt)) is None


@pytest.mark.parametrize(
    ("dtype", "rounding", "mistake"),
    [
        (torch.float64, 1e-12, 1e-7),
        (torch.float32, 1e-6, 1e-2),
        (torch.bfloat16, 1e-2, 0.5),
        (torch.complex128, 1e-12, 1e-7),
    ],
)
def test_values_agree_within_rounding(dtype: torch.dtype, rounding: float, mistake: float) -> None:
    one = (
        torch.linspace(-2, 2, 50, dtype=torch.complex128).to(dtype)
        if dtype.is_complex
        else torch.linspace(-2, 2, 50).to(dtype)
    )
    assert agree(one, one + rounding)
    assert not agree(one, one + mistake)
    assert not agree(one, one.to(torch.complex64))


def test_infinities_and_nan_agree_at_the_same_places_only() -> None:
    one = torch.tensor([1.0, float("inf"), float("nan")])
    assert agree(one, one.clone())
    assert not agree(one, torch.tensor([1.0, float("nan"), float("inf")]))
    assert agree(torch.ones(0), torch.ones(0))
    assert not agree(torch.tensor([1, 2]), torch.tensor([1, 3]))
