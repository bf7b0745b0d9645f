# SPDX-License-Identifier: Apache-2.0
"""What rankwise verify compares, in which order, and what it counts as rounding: on records made by hand."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from recorded import FLOOR, GRADIENT, one_rank, parameter, rank_run, sketch, step, two_ranks

from rankwise.verify import compare, conclude, sketches
from rankwise.verify.compare import Difference, Floor, measured_floor
from rankwise.verify.conclude import Report, Verdict
from rankwise.verify.records import ModuleOutput, RankRun, add_to, read

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def differences(reference: RankRun, many: Sequence[RankRun], floor: Floor) -> list[Difference]:
    return list(compare.differences(compare.gaps(reference, many), floor))


def test_shares_that_add_up_are_equal() -> None:
    assert differences(one_rank(), two_ranks().ranks, FLOOR) == []


@pytest.mark.parametrize(
    ("changes", "phase", "name"),
    [
        ({"inputs": (8, 9), "modules": ()}, "data", "samples passed"),
        ({"parameters": (parameter("Net.first.weight", start=1.1),)}, "initial parameters", "Net.first.weight"),
        ({"modules": (ModuleOutput("Net.first", "Linear", sketch(GRADIENT, 0.9, 2)),)}, "forward", "Net.first"),
        (
            {"parameters": (parameter("Net.first.weight"), parameter("Net.last.weight", 0.9))},
            "gradient",
            "Net.last.weight",
        ),
        ({"hyperparameters": ({"lr": 0.2},)}, "hyperparameters", "lr"),
        (
            {"parameters": (parameter("Net.first.weight", lr=0.2), parameter("Net.last.weight"))},
            "update",
            "Net.first.weight",
        ),
    ],
)
def test_the_first_difference_is_the_first_in_causal_order(changes: dict[str, Any], phase: str, name: str) -> None:
    # What follows from it differs too, and is not first.
    later = {"hyperparameters": ({"lr": 7.0},)} if phase in {"data", "forward"} else {}
    first = differences(one_rank(), two_ranks({**later, **changes}).ranks, FLOOR)[0].gap
    assert first.phase == phase
    assert name in first.name
    assert first.step == 1


def test_the_state_of_the_optimizer_is_compared_before_the_update() -> None:
    one = one_rank(state={"exp_avg of Net.weight": (1.0, 2.0)})
    for other in ((1.0, 3.0), (-1.0, 2.0), None):
        held = {} if other is None else {"exp_avg of Net.weight": other}
        many = two_ranks({"state": {"exp_avg of Net.weight": (1.0, 2.0)}}, {"state": held})
        (found,) = differences(one, many.ranks, FLOOR)
        assert (found.gap.phase, found.gap.name, found.gap.ranks) == ("optimizer state", "exp_avg of Net.weight", (1,))


def test_buffers_are_compared_on_every_rank() -> None:
    one = one_rank(buffers={"Net.mean": sketch(GRADIENT)})
    many = two_ranks({"buffers": {"Net.mean": sketch(GRADIENT)}}, {"buffers": {"Net.mean": sketch(GRADIENT, 2.0)}})
    (found,) = differences(one, many.ranks, FLOOR)
    assert (found.gap.phase, found.gap.ranks) == ("buffers", (1,))


def test_inputs_that_a_model_computed_may_differ_by_rounding() -> None:
    # As a discriminator's: other bits, the same sums.
    many = two_ranks({"inputs": (11, 12)}, {"inputs": (13, 14)})
    assert differences(one_rank(), many.ranks, FLOOR) == []


def test_ranks_that_compute_the_whole_batch_are_compared_one_by_one() -> None:
    whole = step((1, 2, 3, 4))
    assert differences(one_rank(), (rank_run(whole), rank_run(whole, rank=1)), FLOOR) == []
    other = replace(whole, modules=(ModuleOutput("Net.first", "Linear", sketch(GRADIENT, 3.0, 4)),))
    found = differences(one_rank(), (rank_run(whole), rank_run(other, rank=1)), FLOOR)
    assert (found[0].gap.phase, found[0].gap.ranks) == ("forward", (1,))


def test_rounding_is_measured_and_has_limits() -> None:
    one = one_rank()
    slightly = one_rank(parameters=(parameter("Net.first.weight", 1 + 1e-9), parameter("Net.last.weight")))
    floor = measured_floor(one, slightly)
    assert floor.tolerance(1, "gradient") == pytest.approx(30 * 1e-9, rel=0.01)
    assert floor.tolerance(2, "gradient") == 1e-8
    assert floor.tolerance(1, "data") < 1e-9
    grown = Floor("float64", {(9, "update"): 0.5})
    assert grown.tolerance(9, "update") > 1e6
    assert grown.last_step is None


def test_steps_in_which_rounding_has_grown_too_far_are_not_compared() -> None:
    floor = Floor("float64", {(1, "gradient"): 1e-12, (2, "gradient"): 1e-2})
    assert (floor.last_step, FLOOR.last_step) == (1, None)
    good, bad = step((1, 2)), step((1, 2), parameters=(parameter("Net.first.weight", 5.0),))
    one = rank_run(step((1, 2, 3, 4)), step((1, 2, 3, 4)))
    rest = step((3, 4))
    many = (rank_run(good, bad), rank_run(rest, rest, rank=1))
    assert differences(one, many, floor) == []
    assert differences(one, many, FLOOR)[0].gap.step == 2
    # Settings are not subject to rounding.
    other = replace(good, hyperparameters=({"lr": 9.0},))
    assert differences(one, (rank_run(good, other), many[1]), floor)[0].gap.name == "lr"


def test_a_first_step_that_is_all_rounding_cannot_be_compared() -> None:
    verdict = conclude.conclusion(one_rank(), two_ranks(), Floor("as-is", {(1, "gradient"): 0.1}), [], is_joined=False)
    assert (verdict.status, verdict.why[:8]) == ("not compared", "rounding")


def test_a_result_that_depends_on_the_order_of_samples_has_no_measured_floor() -> None:
    other = one_rank(modules=(ModuleOutput("Net.first", "Linear", sketch(GRADIENT, 2.0, 4)),))
    floor = measured_floor(one_rank(), other)
    assert floor.measured is None
    assert "order of samples" in floor.why_assumed
    assert floor.tolerance(1, "gradient") == 1e-7


@pytest.mark.parametrize(("later", "is_measured"), [(1e-7, True), (1e-3, False)])
def test_a_later_step_that_depends_on_the_order_of_samples(later: float, is_measured: bool) -> None:
    def run(*errors: float) -> RankRun:
        changed = [(parameter("Net.first.weight", 1 + error), parameter("Net.last.weight")) for error in errors]
        return rank_run(*(step((1, 2, 3, 4), parameters=held) for held in changed))

    # Rounding grows by a factor, and does not jump.
    floor = measured_floor(run(0.0, 0.0, 0.0), run(1e-12, 1e-10, later))
    assert (floor.measured is not None) == is_measured
    assert is_measured or floor.why_assumed == "from step 3 on, the result depends on the order of samples in a batch"


def test_two_runs_on_one_rank_that_differ_are_unseeded() -> None:
    other: dict[str, Any] = {"inputs": (9, 8, 7, 6), "modules": ()}
    # The same samples, with noise that the script adds.
    for changes in ({}, other):
        assert conclude.unseeded(one_rank(), one_rank(**changes)) is None
    for changes in ({"parameters": (parameter("Net.first.weight", start=2.0),)}, {**other, "batches": ()}):
        verdict = conclude.unseeded(one_rank(), one_rank(**changes))
        assert verdict is not None
        assert verdict.cause is not None
        assert verdict.cause.key == "unseeded"


def test_whose_batches_ranks_take() -> None:
    assert conclude.has_same_batches(one_rank(), two_ranks().ranks)
    # Each rank takes as many as one rank does.
    more = (rank_run(step((1, 2, 3, 4))), rank_run(step((5, 6, 7, 8)), rank=1))
    assert not conclude.has_same_batches(one_rank(), more)
    # As many together, but others: a sampler that deals them out in another way.
    others = {"inputs": (8, 9), "batches": ()}
    assert not conclude.has_same_batches(one_rank(), two_ranks(others).ranks)


def test_a_file_of_records_is_read_back(tmp_path: Path) -> None:
    rank = one_rank()
    path = tmp_path / "rank-0"
    with path.open("wb") as file:
        add_to(file, facts=rank.facts)
        add_to(file, loaders=rank.loaders[0])
        add_to(file, steps=rank.steps[0])
    whole = path.read_bytes()
    with path.open("ab") as file:
        add_to(file, steps=rank.steps[0])
    path.write_bytes(path.read_bytes()[:-20])
    assert read(path) == replace(rank, end="")
    path.write_bytes(whole)
    with path.open("ab") as file:
        add_to(file, end="script", batches_kept=True)
    assert read(path) == rank
    assert read(tmp_path / "none") is None


def test_exit_codes() -> None:
    def report(*statuses: Any) -> Report:
        verdicts = tuple(Verdict(num_ranks=number, status=one) for number, one in enumerate(statuses, start=2))
        return Report(script="train.py", dtype="float64", verdicts=verdicts, notes=(), runs=(), seconds=1.0)

    assert report("equal", "equal").exit_code == 0
    assert report("equal", "differs", "not compared").exit_code == 1
    assert report("equal", "not compared").exit_code == 2
    assert json.loads(json.dumps(report("equal").content()))["verdicts"][0]["status"] == "equal"


# -- sketches ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(6, 3), (6, 40, 50), (6,), (6, 0)])
def test_sketches_of_parts_add_up(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    tensor = torch.randn(shape, dtype=torch.float64)
    whole, parts = sketches.of_rows(tensor), sketches.of_rows(tensor[:2]) + sketches.of_rows(tensor[2:])
    assert (parts.rows, parts.shape) == (6, shape[1:])
    assert parts.squares == pytest.approx(whole.squares)
    assert parts.projections == pytest.approx(whole.projections)
    assert parts.bends == pytest.approx(whole.bends)


def test_projections_tell_the_size_of_a_difference() -> None:
    torch.manual_seed(0)
    tensor = torch.randn(5000, dtype=torch.float64)
    other = tensor.clone()
    other[77] += 1e-6
    apart = sketches.of_tensor(tensor).minus(sketches.of_tensor(other))
    assert 1e-7 < math.sqrt(sum(one * one for one in apart) / 8) < 1e-5


def test_rows_that_are_normalized_differently_are_told_apart() -> None:
    # Both have a mean of zero and a variance of one in every column, as BatchNorm's outputs do.
    torch.manual_seed(0)
    rows = torch.randn(8, 3, dtype=torch.float64)
    whole = sketches.of_rows((rows - rows.mean(0)) / rows.std(0, correction=0))
    halves = [sketches.of_rows((half - half.mean(0)) / half.std(0, correction=0)) for half in rows.chunk(2)]
    parts = halves[0] + halves[1]
    assert parts.projections == pytest.approx(whole.projections, abs=1e-9)
    assert parts.squares == pytest.approx(whole.squares)
    one = one_rank(modules=(ModuleOutput("Net.norm", "BatchNorm1d", whole),))
    many = [{"modules": (ModuleOutput("Net.norm", "BatchNorm1d", half),)} for half in halves]
    assert differences(one, two_ranks(*many).ranks, FLOOR)[0].gap.name == "Net.norm"


def test_digests_tell_rows_apart() -> None:
    x, y = torch.arange(12.0).view(4, 3), torch.tensor([0, 1, 0, 1])
    digests = sketches.digests_of_rows([x, y])
    assert len(set(digests)) == 4
    order = torch.tensor([2, 0, 3, 1])
    assert sketches.digests_of_rows([x[order], y[order]]) == tuple(digests[number] for number in order)
    assert sketches.digests_of_rows([x, 1 - y]) != digests
    # A dtype that holds the same value is no difference.
    assert sketches.digests_of_rows([x.double(), y]) == digests


def test_batches_are_permuted_and_joined() -> None:
    batch = {"x": torch.arange(6.0).view(3, 2), "names": ["a", "b", "c"], "size": 7}
    other = sketches.permuted(batch)
    order = [batch["names"].index(name) for name in other["names"]]
    assert sorted(order) == [0, 1, 2]
    assert torch.equal(other["x"], batch["x"][order])
    both = sketches.joined([batch, other])
    assert both["names"] == [*batch["names"], *other["names"]]
    assert both["x"].shape == (6, 2)
    assert both["size"] == 7
    with pytest.raises(ValueError, match=r"\[1, 2\], \[1, 3\] cannot be joined"):
        sketches.joined([torch.ones(1, 2), torch.ones(1, 3)])


def test_a_sketch_can_be_written_as_json() -> None:
    assert json.loads(json.dumps(asdict(sketch(GRADIENT))))["rows"] == 1
