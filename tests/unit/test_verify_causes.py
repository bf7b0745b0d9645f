# SPDX-License-Identifier: Apache-2.0
"""From a difference to its cause: each signature of rankwise verify on records made by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from recorded import FLOOR, GRADIENT, LINE, one_rank, parameter, rank_run, sketch, step, two_ranks

from rankwise.verify import conclude, mistakes
from rankwise.verify.conclude import Report, Verdict
from rankwise.verify.records import Batch, Call, Last, ModuleOutput, RankRun, Run, Written, assembled
from rankwise.verify.report import difference_in_words, page_of, text_of


def concluded(one: RankRun, many: Run, *, is_joined: bool = False) -> Verdict:
    found = list(mistakes.findings(one, many.ranks))
    return conclude.conclusion(one, many, FLOOR, found, is_joined=is_joined)


def key_of(one: RankRun, many: Run) -> str | None:
    cause = concluded(one, many).cause
    return None if cause is None else cause.key


def both(gradient: float, local: float) -> dict[str, Any]:
    return {"parameters": tuple(parameter(f"Net.{name}.weight", gradient, local) for name in ("first", "last"))}


def only_last(gradient: float, local: float) -> dict[str, Any]:
    return {"parameters": (parameter("Net.first.weight"), parameter("Net.last.weight", gradient, local))}


def module(name: str, kind: str) -> dict[str, Any]:
    return {"modules": (ModuleOutput(name, kind, sketch(GRADIENT, 5.0, 2)),)}


DREW = (Call(2, drew=True, drew_by_rows=True, line=LINE),)


@pytest.mark.parametrize(
    ("first", "second", "key"),
    [
        (both(2.0, 1.0), None, "summed"),
        (both(0.5, 1.0), None, "divided twice"),
        (both(1.7, 1.0), None, "scaled"),
        (both(0.4, 0.4), both(1.6, 1.6), "not exchanged"),
        (only_last(0.4, 0.4), only_last(1.6, 1.6), "bypassed"),
        (only_last(0.0, 0.0), None, "unused"),
        ({**both(0.3, 0.4), "clipped": (3.0,)}, {**both(0.7, 1.6), "clipped": (4.0,)}, "local clipping"),
        ({"hyperparameters": ({"lr": 0.2},)}, None, "scaled setting"),
        ({"hyperparameters": ({"lr": 0.2},)}, {"hyperparameters": ({"lr": 0.1},)}, "local decision"),
        ({"hyperparameters": ({"lr": 0.05},), "num_scheduler_steps": 2}, None, "scheduler"),
        (module("Net.norm", "BatchNorm2d"), None, "batchnorm"),
        (module("Net.first", "Dropout"), None, "dropout masks"),
        ({**module("Net.first", "Linear"), "calls": DREW}, None, "dropout masks"),
        (module("Net.first", "Linear"), None, "coupled samples"),
        ({"inputs": (8, 9), "modules": ()}, None, "noise in the loop"),
        ({"inputs": (8, 9), "modules": (), "batches": (Batch(0, 0, (8, 9)),)}, None, "other samples"),
        ({"parameters": (parameter("Net.first.weight", start=2.0),)}, {}, "different start"),
        ({"parameters": (parameter("Net.first.weight", start=2.0),)}, None, "seeded by rank"),
        ({"parameters": (parameter("Net.first.weight", lr=0.3),)}, None, "update"),
    ],
)
def test_the_cause_of_a_difference(first: dict[str, Any], second: dict[str, Any] | None, key: str) -> None:
    one = one_rank()
    if first.get("modules"):
        name = first["modules"][0]
        one = one_rank(modules=(replace(name, output=sketch(GRADIENT, 1.0, 4)),))
    if second is None and "inputs" in first:
        second = {**first, "inputs": (10, 11)}
        if "batches" in first:
            second["batches"] = (Batch(0, 0, (10, 11)),)
    assert key_of(one, two_ranks(first, second)) == key


def test_a_mean_of_means_of_unequal_shares() -> None:
    # Three samples with a gradient of 1 and one with 5: their mean is 2, the mean of the ranks' means 3.
    one = one_rank(**both(2.0, 2.0))
    ranks = (
        rank_run(step((1, 2, 3), **both(3.0, 1.0))),
        rank_run(step((4,), **both(3.0, 5.0)), rank=1),
    )
    verdict = concluded(one, Run(ranks, 0))
    assert verdict.cause is not None
    assert verdict.cause.key == "mean of means"
    # With layers that are not all scaled alike.
    mixed = {"parameters": (parameter("Net.first.weight", 2.0, 2.0), parameter("Net.last.weight", 4.25, 4.25))}
    ranks = tuple(
        replace(rank, steps=(replace(rank.steps[0], parameters=(rank.steps[0].parameters[0], other)),))
        for rank, other in zip(
            ranks, (parameter("Net.last.weight", 3.5, 5.0), parameter("Net.last.weight", 3.5, 2.0)), strict=True
        )
    )
    verdict = concluded(one_rank(**mixed), Run(ranks, 0))
    assert verdict.cause is not None
    assert verdict.cause.key == "mean of means"
    assert "3, 1 samples" in verdict.cause.words


def test_summed_gradients_are_recognized_although_they_were_clipped() -> None:
    # The norm was 2 on one rank and 4 on two; clipped to 1, gradients are as large.
    one = one_rank(**both(0.9, 1.0), clipped=(2.0,))
    assert key_of(one, two_ranks({**both(1.2, 1.0), "clipped": (4.0,)})) == "summed"


def test_the_state_of_the_optimizer() -> None:
    one = one_rank(state={"step of Net.weight": (3.0, 3.0)})
    many = two_ranks({"state": {"step of Net.weight": (0.0, 0.0)}})
    assert key_of(one, many) == "optimizer state"


def test_buffers_of_batchnorm() -> None:
    one = one_rank(buffers={"Net.norm.running_mean": sketch(GRADIENT)})
    many = two_ranks({"buffers": {"Net.norm.running_mean": sketch(GRADIENT, 1.5)}})
    assert key_of(one, many) == "batchnorm"
    one = one_rank(buffers={"Net.codes": sketch(GRADIENT)})
    many = two_ranks({"buffers": {"Net.codes": sketch(GRADIENT, 2)}})
    assert key_of(one, many) == "buffers"


def told(run: Run, **changes: Any) -> Run:
    """Return the run with more that each rank recorded."""
    return replace(run, ranks=tuple(replace(rank, **changes) for rank in run.ranks))


def test_values_that_ranks_give_to_a_scheduler() -> None:
    many = told(two_ranks({"metrics": (0.5,)}, {"metrics": (0.7,)}), scheduler_line="train.py:9")
    verdict = concluded(one_rank(metrics=(0.6,)), many)
    assert verdict.cause is not None
    assert (verdict.cause.key, verdict.cause.line) == ("local decision", "train.py:9")
    assert verdict.cause.evidence == ("rank 0: 0.5", "rank 1: 0.7")
    # A sum over ranks decides as the value of one rank does.
    assert concluded(one_rank(metrics=(0.6,)), two_ranks({"metrics": (1.2,)})).status == "equal"


def test_values_that_ranks_give_to_a_scheduler_after_the_last_step() -> None:
    ranks = [
        replace(rank, last=Last({}, {}, (value,))) for rank, value in zip(two_ranks().ranks, (1.0, 2.0), strict=True)
    ]
    verdict = concluded(replace(one_rank(), last=Last({}, {}, (1.0,))), Run(tuple(ranks), 0))
    assert verdict.cause is not None
    assert verdict.cause.key == "local decision"
    assert difference_in_words(verdict.first, verdict).startswith("after the last step: ") if verdict.first else False


STATISTICS = "AveragedModel.module.1.running_var"


@pytest.mark.parametrize(
    ("name", "key", "uses_rankwise", "fix"),
    [
        (STATISTICS, "copied statistics", True, "rankwise.replicate(copy, sync_batchnorm=True)"),
        (STATISTICS, "copied statistics", False, "a loader without a DistributedSampler"),
        ("AveragedModel.module.1.weight", "copies", True, "equal on all ranks"),
    ],
)
def test_models_that_are_called_without_gradients(name: str, key: str, uses_rankwise: bool, fix: str) -> None:
    def left(factor: float) -> Last:
        return Last({}, {name: sketch(GRADIENT, factor)}, ())

    lines = {"AveragedModel": "train.py:20"}
    one = replace(one_rank(), last=left(1.0), lines_of_copies=lines)
    facts = replace(one.facts, uses_rankwise=uses_rankwise)
    verdict = concluded(one, told(two_ranks(), last=left(1.4), facts=facts))
    assert verdict.cause is not None
    assert verdict.first is not None
    assert (verdict.first.phase, verdict.cause.key, verdict.cause.line) == ("end", key, "train.py:20")
    assert fix in verdict.cause.fix
    # In the step after which they differ.
    one = replace(one_rank(copies=left(1.0).copies), lines_of_copies=lines)
    assert key_of(one, two_ranks({"copies": left(1.4).copies})) == key
    # Names are those of other models if a rank calls one alone.
    alone = {**left(1.4).copies, "Net#2.running_mean": sketch(GRADIENT)}
    assert concluded(one, two_ranks({"copies": left(1.4).copies}, {"copies": alone})).status == "equal"


def test_what_rankwise_has_said_is_the_cause_if_numbers_tell_a_general_one() -> None:
    differs = {**both(0.4, 0.4), "modules": ()}, {**both(1.6, 1.6), "modules": ()}
    warned = told(two_ranks(*differs), warnings=("a hook clips gradients; keep it linear; or leave it out",))
    verdict = concluded(one_rank(), warned)
    assert verdict.cause is not None
    assert (verdict.cause.key, verdict.cause.fix) == ("warned", "keep it linear; or leave it out")
    assert verdict.cause.words == "rankwise warns of it: a hook clips gradients"
    error = "rankwise.errors.ReplicasDiffer: Gradients differ.\n  do        average each gradient"
    verdict = concluded(one_rank(), told(warned, end=error))
    assert verdict.cause is not None
    assert (verdict.cause.key, verdict.cause.fix) == ("failed", "average each gradient")
    # A cause that is exact from the numbers remains.
    warned = told(two_ranks(both(2.0, 1.0)), warnings=("a hook clips gradients; keep it linear",))
    assert key_of(one_rank(), warned) == "summed"


def test_a_hook_on_what_the_model_computes() -> None:
    many = told(two_ranks(only_last(0.7, 0.9)), hook_line="train.py:4")
    verdict = concluded(one_rank(), many)
    assert verdict.cause is not None
    assert (verdict.cause.key, verdict.cause.line) == ("hook", "train.py:4")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (both(0.4, 0.4), both(1.6, 1.6)),
        (only_last(0.0, 0.0), None),
        ({**module("Net.first", "Linear"), "calls": DREW}, None),
    ],
)
def test_a_script_that_replicates_is_not_told_to(first: dict[str, Any], second: dict[str, Any] | None) -> None:
    one, many = one_rank(), two_ranks(first, second)
    facts = replace(one.facts, uses_rankwise=True, strategies=("replicate",), randomness=("counter",))
    fixes = [concluded(one, run).cause for run in (many, told(many, facts=facts))]
    plain, own = [cause.fix for cause in fixes if cause is not None]
    assert "rankwise.replicate(model)" in plain
    assert "rankwise.replicate(model)" not in own
    assert "randomness=" not in own


def test_an_argument_is_left_out_only_where_it_is_passed() -> None:
    one, many = one_rank(), two_ranks({**module("Net.first", "Linear"), "calls": DREW})
    facts = replace(one.facts, uses_rankwise=True, strategies=("replicate",), randomness=("per_rank",))
    cause = concluded(one, told(many, facts=facts)).cause
    assert cause is not None
    assert "leave out randomness=" in cause.fix


def test_a_file_beside_the_working_folder_is_named() -> None:
    run = Run((replace(one_rank(), missing="../data/x.csv"),), 1)
    why = conclude.not_compared(2, "it fails on one rank", run).why
    assert "../data/x.csv is outside the working folder" in why
    assert "absolute path" in why


def test_a_model_that_all_ranks_train_alike_first_is_no_mistake() -> None:
    alike, samples = step((1, 2, 3, 4)), (5, 6, 7, 8)
    one = rank_run(alike, step(samples, batches=(Batch(1, 0, samples),)))
    parts = [step(part, batches=(Batch(1, 0, part),)) for part in ((5, 6), (7, 8))]
    many = [rank_run(alike, part, rank=rank) for rank, part in enumerate(parts)]
    assert list(mistakes.findings(one, many)) == []


def test_the_same_samples_on_every_rank() -> None:
    whole = step((1, 2, 3, 4))
    assert key_of(one_rank(), Run((rank_run(whole), rank_run(whole, rank=1)), 0)) == "same samples"


def test_a_loader_that_is_as_long_on_two_ranks_as_on_one() -> None:
    one = rank_run(step((1, 2)), step((3, 4)))
    many = (rank_run(step((1, 2)), step((3, 4))), rank_run(step((3, 4)), step((1, 2)), rank=1))
    found = {finding.cause.key for finding in mistakes.findings(one, many)}
    assert "same samples" in found


def test_samples_that_are_repeated_to_fill_the_last_batch() -> None:
    one = rank_run(step((1, 2, 3)))
    many = (rank_run(step((1, 2))), rank_run(step((3, 1)), rank=1))
    assert [finding.cause.key for finding in mistakes.findings(one, many)] == ["repeated samples"]
    # Samples that the data itself repeats are no mistake.
    twice = rank_run(step((1, 2, 3, 1)))
    assert list(mistakes.findings(twice, many)) == []


def epochs(*orders: tuple[int, ...]) -> RankRun:
    steps = [step(order, batches=(Batch(0, epoch, order),)) for epoch, order in enumerate(orders)]
    return rank_run(*steps)


def test_a_sampler_without_set_epoch() -> None:
    order = tuple(range(8))
    other = tuple(range(8, 16))
    many = (epochs(order, order), replace(epochs(other, other), facts=replace(epochs().facts, rank=1)))
    assert "same order" in [finding.cause.key for finding in mistakes.findings(epochs(order, order), many)]
    # Nor is an evaluation an epoch.
    first, second = epochs(order, order).steps
    evaluated = replace(second, batches=tuple(replace(batch, is_trained=False) for batch in second.batches))
    many = (rank_run(first, evaluated), rank_run(first, evaluated, rank=1))
    assert "same order" not in [finding.cause.key for finding in mistakes.findings(many[0], many)]
    changed = (epochs(order, order[::-1]), epochs(other, other[::-1]))
    assert "same order" not in [finding.cause.key for finding in mistakes.findings(epochs(order, order), changed)]


def test_ranks_that_draw_alike_while_they_read() -> None:
    def drawn(samples: tuple[int, ...], state: str) -> RankRun:
        return rank_run(step(samples, batches=(Batch(0, 0, samples, drawn=state),)))

    alike, apart = (drawn((1, 2), "a"), drawn((3, 4), "a")), (drawn((1, 2), "a"), drawn((3, 4), "b"))
    assert [finding.cause.key for finding in mistakes.findings(one_rank(), alike)] == ["equal augmentations"]
    assert list(mistakes.findings(one_rank(), apart)) == []


def test_a_file_that_two_ranks_write() -> None:
    written = (Written("model.pt", "train.py:9"),)
    many = two_ranks()
    many = replace(many, ranks=tuple(replace(rank, written=written) for rank in many.ranks))
    verdict = concluded(one_rank(), many)
    assert verdict.cause is not None
    assert (verdict.cause.key, verdict.cause.line) == ("written twice", "train.py:9")
    assert "ranks 0-1" in verdict.cause.words
    one_only = replace(many, ranks=(many.ranks[0], replace(many.ranks[1], written=())))
    assert concluded(one_rank(), one_only).status == "equal"


@pytest.mark.parametrize(
    ("steps", "end", "exit_code", "key"),
    [
        ((2, 1), "script", 0, "local stop"),
        ((1, 1), "", 124, "hang"),
        ((1, 1), "ValueError: no\n  do        pass another", 1, "failed"),
        ((1, 1), "script", 0, "number of steps"),
    ],
)
def test_how_ranks_end(steps: tuple[int, int], end: str, exit_code: int, key: str) -> None:
    one = rank_run(step((1, 2, 3, 4)), step((1, 2, 3, 4)))
    parts = ((1, 2), (3, 4))
    ranks = tuple(rank_run(*[step(parts[rank])] * count, rank=rank, end=end) for rank, count in enumerate(steps))
    verdict = conclude.conclusion(one, Run(ranks, exit_code), FLOOR, [], is_joined=False)
    assert verdict.cause is not None
    assert verdict.cause.key == key
    if key == "failed":
        assert verdict.cause.fix == "pass another"


def test_the_rank_that_failed_first_is_named_with_its_line() -> None:
    part = rank_run(step((1, 2)), end="KeyError: 'a'")
    crashed = replace(part, facts=replace(part.facts, rank=1), end_line="train.py:9")
    stopped = replace(part, end="rankwise.errors.PeerFailed: Rank 1 failed: KeyError.\n  do        fix rank 1")
    # Rank 0 took one more step before it noticed.
    stopped = replace(stopped, steps=part.steps * 2)
    for ranks in ((stopped, crashed), (stopped, replace(crashed, steps=()))):
        run = Run(ranks, 1)
        ended = conclude.without_steps(2, one_rank(), run) if not ranks[1].steps else None
        verdict = ended or conclude.conclusion(rank_run(*part.steps * 3), run, FLOOR, [], is_joined=False)
        assert verdict.cause is not None
        assert (verdict.cause.key, verdict.cause.line, verdict.cause.fix) == ("failed", "train.py:9", "fix this error")
        assert verdict.cause.words == "it runs on one rank and fails on 2 ranks: KeyError: 'a', on rank 1"


def test_draws_that_one_rank_cannot_repeat_are_no_difference() -> None:
    drew = (Call(2, drew=True, drew_by_rows=False, line=LINE),)
    many = two_ranks({**module("Net.first", "Linear"), "calls": drew})
    verdict = concluded(one_rank(), many, is_joined=True)
    assert verdict.status == "not compared"
    assert "random numbers" in verdict.why


def test_what_is_shown() -> None:
    differs = concluded(one_rank(), two_ranks(both(2.0, 1.0)))
    equal = replace(concluded(one_rank(), two_ranks()), num_ranks=3, notes=("a <note>",))
    unknown = Verdict(num_ranks=4, status="not compared", why="it fails")
    report = Report(
        script="train.py --name '<b>'",
        dtype="float64",
        verdicts=(differs, equal, unknown),
        notes=(),
        runs=(("1 rank", 1.0),),
        seconds=3.0,
    )
    text = text_of(report)
    assert "2 ranks do not compute what one rank computes" in text
    assert "first     step 1, gradient: Net.first.weight, relative difference 1.0e+00 (rounding explains 1e-08)" in text
    assert "equal     until then: data, initial parameters, forward" in text
    assert f"({LINE})" in text
    assert "3 ranks compute what one rank computes, over 1 step\n" in text
    assert "4 ranks could not be compared with one\n  why       it fails" in text
    page = page_of(report)
    assert "<b>" not in page
    assert "http" not in page
    assert page.count("<section") == 3
    assert "Net.first" in page


def keeping(value: float, size: float = 1.0) -> dict[str, Any]:
    """Return the changes of a step whose gradients differ, in a script that keeps a queue and a number."""
    return {
        **both(value, 1.0),
        "kept": {"level": replace(sketch((1.0,), value), shape=()), "queue": sketch(GRADIENT, size)},
    }


def test_a_value_that_is_kept_from_step_to_step() -> None:
    equal, apart = step((1, 2, 3, 4)), step((5, 6, 7, 8), **keeping(1.0))
    one = rank_run(equal, apart, lines_of_kept={"queue": "train.py:3", "level": "train.py:4"})

    def many(size: float, **changes: Any) -> Run:
        first = step((1, 2)), step((5, 6), **keeping(1.3, size))
        second = step((3, 4)), step((7, 8), **keeping(1.3, size))
        return told(Run((rank_run(*first), rank_run(*second, rank=1)), 0), **changes)

    # Only the number differs.
    for size, name, line in ((1.0, "level", "train.py:4"), (2.0, "queue", "train.py:3")):
        verdict = concluded(one, many(size, hook_line="train.py:5"))
        assert verdict.cause is not None
        assert (verdict.cause.key, verdict.cause.line) == ("kept value", line)
        assert verdict.cause.words.startswith(f"{name} is kept from step to step")
    # What rankwise has warned of is told as well.
    verdict = concluded(one, many(2.0, warnings=("a hook clips; keep it linear",), hook_line="train.py:5"))
    assert [cause.key for cause in verdict.also] == ["warned"]
    # A value that is passed to a model, such as a pool of images; the batch is of an earlier step.
    pooled = {"inputs": (9, 9), "batches": (), "modules": (), "kept": {"pool.images": sketch(GRADIENT, 2.0)}}
    ranks = rank_run(step((1, 2)), step((5, 6), **pooled)), rank_run(step((3, 4)), step((7, 8), **pooled), rank=1)
    drawn = {"inputs": (9, 8, 7, 6), "batches": (), "modules": (), "kept": {"pool.images": sketch(GRADIENT)}}
    assert key_of(rank_run(equal, step((5, 6, 7, 8), **drawn)), Run(ranks, 0)) == "kept value"
    # Rows that ranks carry along are parts of what one rank has.
    rows = replace(sketch(GRADIENT), shape=(2,))
    carried = replace(step((5, 6), **both(1.3, 1.0)), kept={"state": rows})
    alone = rank_run(equal, replace(apart, kept={"state": replace(rows, shape=(4,))}))
    ranks = rank_run(step((1, 2)), carried), rank_run(step((3, 4)), replace(carried, inputs=(7, 8)), rank=1)
    assert key_of(alone, told(Run(ranks, 0), hook_line="train.py:5")) != "kept value"


def test_a_strategy_that_gives_up_equality_by_choice() -> None:
    many = two_ranks(only_last(0.7, 0.9))
    facts = replace(many.ranks[0].facts, inexact={"rankwise.local_sgd()": "train.py:2"})
    verdict = concluded(one_rank(), told(many, facts=facts, warnings=("something; do it",)))
    assert verdict.cause is not None
    assert (verdict.cause.key, verdict.cause.line) == ("by choice", "train.py:2")


def test_files_that_ranks_load() -> None:
    start = {"parameters": (parameter("Net.first.weight", start=2.0),)}
    one = replace(one_rank(), loaded={"start.pt": "train.py:3"})
    # Rank 0 alone.
    many = two_ranks({}, start)
    ranks = replace(many.ranks[0], loaded=one.loaded), many.ranks[1]
    verdict = concluded(one, replace(many, ranks=ranks))
    assert verdict.cause is not None
    assert (verdict.cause.key, verdict.cause.line) == ("other checkpoint", "train.py:3")
    assert verdict.cause.evidence == ("one rank: start.pt", "rank 0: start.pt", "rank 1: none")
    assert key_of(one, told(many, loaded=one.loaded)) == "different start"


@pytest.mark.parametrize(("loss", "key"), [(1.2, "micro-batch loss"), (1.0, "own stages")])
def test_the_loss_and_the_gradients_of_a_pipeline(loss: float, key: str) -> None:
    changes = {**both(1.3, 1.0), "losses": (loss,)}
    many = two_ranks(
        {**changes, "inputs": (1, 2, 3, 4), "rows": 4}, {**changes, "inputs": (), "rows": 0, "modules": ()}
    )
    first = replace(many.ranks[0].steps[0], modules=one_rank().steps[0].modules)
    facts = replace(many.ranks[0].facts, strategies=("pipeline",))
    ranks = replace(many.ranks[0], steps=(first,)), many.ranks[1]
    assert key_of(one_rank(), told(replace(many, ranks=ranks), facts=facts)) == key


def test_parts_of_parameters_are_put_together() -> None:
    part, other = replace(parameter("Net.first.weight"), ranks=(0, 1)), parameter("Net.last.weight")
    ranks = [
        rank_run(step((1, 2), parameters=(part, other)), rank=0),
        rank_run(step((), parameters=(part,), buffers={"Net.mean": sketch(GRADIENT)}), rank=1),
    ]
    # Both hold a half of one parameter, and are two stages of a pipeline.
    whole = assembled(ranks)
    for rank in whole:
        found = {one.name: one for one in rank.steps[0].parameters}
        assert found["Net.first.weight"].before.projections == tuple(2 * value for value in part.before.projections)
        assert found["Net.first.weight"].local is None
        assert found["Net.last.weight"] == other
        assert list(rank.steps[0].buffers) == ["Net.mean"]
    apart = [replace(rank, facts=replace(rank.facts, data_rank=number)) for number, rank in enumerate(ranks)]
    assert [len(rank.steps[0].parameters) for rank in assembled(apart)] == [2, 1]


def test_a_run_that_is_continued() -> None:
    before = [(parameter("Net.first.weight", start=float(number)),) for number in range(1, 5)]
    one = rank_run(*(step((1, 2, 3, 4), parameters=held) for held in before), end="steps")

    def continued(first: int, **changes: Any) -> Run:
        steps = [replace(step((1, 2), parameters=held), **changes) for held in before[first:]]
        others = [replace(one, inputs=(3, 4), batches=(Batch(0, 0, (3, 4)),)) for one in steps]
        others = [replace(one, modules=step((3, 4)).modules) for one in others]
        return Run((rank_run(*steps), rank_run(*others, rank=1)), 0)

    verdict = conclude.resumed_verdict(one, continued(2), FLOOR)
    assert (verdict.status, verdict.num_steps) == ("equal", 2)
    assert "they continue after step 2" in verdict.notes[0]
    verdict = conclude.resumed_verdict(one, continued(2, hyperparameters=({"lr": 0.2},)), FLOOR)
    assert verdict.cause is not None
    assert (verdict.status, verdict.cause.key) == ("differs", "resumed apart")
    assert "the state of a scheduler" in verdict.cause.words
    assert conclude.resumed_verdict(one, continued(0), FLOOR).status == "not compared"
