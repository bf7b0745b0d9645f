# SPDX-License-Identifier: Apache-2.0
"""What a report says of steps whose cause of slowness is known, and that it says nothing where there is none."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from rankwise.charts import duration
from rankwise.insight import page, words
from rankwise.insight.findings import Finding, findings_of
from rankwise.insight.html import PART_NAMES, TITLES
from rankwise.insight.run_records import RunRecords
from rankwise.insight.step_record import Now, Record, Step
from rankwise.insight.step_table import RunSpeed, StepTable, table_of, times_faster
from rankwise.meter import BACKWARD, CHECKPOINT, DATA, EXCHANGE, FORWARD, OPTIMIZER, PARTS, SCRIPT

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from rankwise.insight.html import Language

NUM_STEPS = 60
USUAL = {DATA: 0.001, FORWARD: 0.004, BACKWARD: 0.008, SCRIPT: 0.0005, OPTIMIZER: 0.001}
"""Seconds of each part of a usual step, by its number."""


def job(
    num_ranks: int,
    *,
    slow: int | None = None,
    more: dict[int, float] | None = None,
    processor: float = 1.0,
    queued: float = 0.0,
    transfer: float = 0.0005,
    every: int = 1,
    all_more: dict[int, float] | None = None,
    **counts: int,
) -> list[Record]:
    """Return the records of a job in which rank ``slow`` takes ``more`` seconds for some parts of a step.

    Ranks leave each exchange together. ``processor`` is the share of its time that the slow rank has a processor;
    ``counts`` replaces counts of its steps.
    """
    draw = random.Random(1)
    steps: list[list[Step]] = [[] for _ in range(num_ranks)]
    now = 100.0
    for number in range(1, NUM_STEPS + 1):
        own = []
        for rank in range(num_ranks):
            parts = [0.0] * len(PARTS)
            is_slow = rank == slow and number % every == 0
            for extra in (USUAL, all_more or {}, (more or {}) if is_slow else {}):
                for part, seconds in extra.items():
                    parts[part] += seconds * draw.uniform(0.97, 1.03)
            own.append(parts)
        arrivals = [sum(parts) for parts in own]
        end = max(arrivals) + transfer
        for rank, parts in enumerate(own):
            working = sum(parts)
            parts[EXCHANGE] = end - arrivals[rank]
            facts: dict[str, Any] = {"samples": 32, "major_faults": 0}
            if rank == slow:
                facts |= counts
            steps[rank].append(
                Step(
                    number=number,
                    start=now,
                    parts=tuple(parts),
                    arrival=arrivals[rank],
                    late_exchange=0.0,
                    processor=working * (processor if rank == slow else 1.0),
                    queued=queued if rank == slow else 0.0,
                    sent_bytes=1000,
                    memory_bytes=2**20,
                    **facts,
                )
            )
        now += end
    return [
        Record(
            facts={"rank": rank, "world_size": num_ranks},
            steps=own,
            notes=[],
            now=Now(part=0, step_began=0.0, num_steps=1),
        )
        for rank, own in enumerate(steps)
    ]


def found(records: list[Record], hostnames: list[str] | None = None) -> list[Finding]:
    return findings_of(table_of(records), hostnames or ["one"] * len(records))


CAUSES: list[tuple[str, dict[str, Any]]] = [
    ("data", {"more": {DATA: 0.006}}),
    ("data", {"more": {DATA: 0.020, FORWARD: 0.003, BACKWARD: 0.004}, "processor": 0.3}),
    ("script", {"more": {SCRIPT: 0.006}}),
    ("slower", {"more": {FORWARD: 0.003, BACKWARD: 0.004}}),
    ("longer", {"more": {FORWARD: 0.003, BACKWARD: 0.004}, "samples": 0}),
    ("more samples", {"more": {FORWARD: 0.003, BACKWARD: 0.004}, "samples": 48}),
    ("shared processor", {"more": {FORWARD: 0.003, BACKWARD: 0.004}, "processor": 0.6, "queued": 0.006}),
    ("stopped", {"more": {FORWARD: 0.003, BACKWARD: 0.004}, "processor": 0.6}),
    ("stopped", {"more": {DATA: 0.002, FORWARD: 0.008, BACKWARD: 0.016, SCRIPT: 0.003}, "processor": 0.3}),
    ("swapping", {"more": {FORWARD: 0.003, BACKWARD: 0.004}, "processor": 0.6, "major_faults": 40}),
]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize(("cause", "how"), CAUSES, ids=[cause for cause, _ in CAUSES])
def test_a_slow_rank_is_named_with_its_cause(num_ranks: int, cause: str, how: dict[str, Any]) -> None:
    # Never the last one only.
    for slow in range(num_ranks):
        first = found(job(num_ranks, slow=slow, **how))[0]
        assert (first.kind, first.ranks, first.cause) == ("slow ranks", (slow,), cause)
        extra = sum(how["more"].values())
        assert first.step_seconds - first.predicted_seconds == pytest.approx(extra, rel=0.1)


def changed(records: list[Record], change: Callable[[int, Step], Step]) -> list[Record]:
    return [replace(one, steps=[change(rank, step) for step in one.steps]) for rank, one in enumerate(records)]


def test_a_rank_that_updates_more_of_what_a_host_shares_is_no_slow_one() -> None:
    def share(rank: int, step: Step) -> Step:
        parts = list(step.parts)
        parts[OPTIMIZER if rank == 0 else EXCHANGE] += 0.01
        return step._replace(parts=tuple(parts), late_exchange=0.01 if rank else 0.0)

    first = found(changed(job(3), share))[0]
    assert (first.kind, first.ranks, first.cause) == ("slow ranks", (0,), "update")
    assert words.gain(first, "en") == ""


def _without_rankwise(rank: int, step: Step) -> Step:
    """Return the step of a script that exchanges gradients itself, in backward, and logs a value now and then."""
    del rank
    parts = list(step.parts)
    parts[BACKWARD] += parts[EXCHANGE]
    parts[SCRIPT] += parts[FORWARD]
    parts[FORWARD], parts[EXCHANGE] = 0.0, 0.0001 if step.number % 16 == 0 else 0.0
    return step._replace(parts=tuple(parts), arrival=0.0)


@pytest.mark.parametrize("more", [{SCRIPT: 0.006}, {FORWARD: 0.006}], ids=["script", "forward"])
def test_a_slow_rank_of_a_script_that_exchanges_gradients_itself_is_named(more: dict[int, float]) -> None:
    records = changed(job(2, slow=1, more=more), _without_rankwise)
    assert table_of(records).is_estimated
    first = found(records)[0]
    assert (first.kind, first.ranks, first.cause) == ("slow ranks", (1,), "unseen")
    of_more = found(changed(job(2, slow=1, more=more, samples=48), _without_rankwise))[0]
    assert (of_more.ranks, of_more.cause) == ((1,), "more samples")


@pytest.mark.parametrize("language", TITLES)
def test_ranks_that_have_taken_different_numbers_of_steps_are_not_compared(language: Language) -> None:
    records = job(2, slow=0, more={SCRIPT: 0.01})
    shifted = [
        # Rank zero's fifth step is one that it took alone: all later ones have one more number.
        replace(one, steps=[*one.steps[:5], *(step._replace(number=step.number + 1) for step in one.steps[4:])])
        if rank == 0
        else one
        for rank, one in enumerate(records)
    ]
    shifted[0] = replace(shifted[0], now=replace(shifted[0].now, num_steps=NUM_STEPS + 1))
    (first,) = found(shifted)
    assert first.kind == "shifted"
    assert words.finding_in_words(first, language)
    assert words.advice(first, language)
    assert found(records)[0].ranks == (0,)
    # A run that is not over: one rank has ended a step that the other is in.
    records[0] = replace(records[0], now=replace(records[0].now, num_steps=NUM_STEPS + 1))
    assert found(records)[0].ranks == (0,)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_of_equal_ranks_nothing_stands_out(num_ranks: int) -> None:
    assert found(job(num_ranks)) == []


def test_a_slow_host_is_named_as_one() -> None:
    records = job(4, slow=2, more={BACKWARD: 0.006})
    other = job(4, slow=3, more={BACKWARD: 0.006})
    # Ranks 2 and 3 are slow in turn.
    mixed = [
        Record(
            facts=one.facts,
            steps=[(a if a.number % 2 else b) for a, b in zip(one.steps, two.steps, strict=True)],
            notes=[],
            now=one.now,
        )
        for one, two in zip(records, other, strict=True)
    ]
    first = found(mixed, ["a", "a", "b", "b"])[0]
    assert (first.kind, first.ranks, first.hostname) == ("slow ranks", (2, 3), "b")


def test_what_all_ranks_spend_much_time_on_is_named() -> None:
    kinds = {
        "data": found(job(3, all_more={DATA: 0.01})),
        "exchange": found(job(3, transfer=0.02)),
        "checkpoint": found(job(3, all_more={CHECKPOINT: 0.01})),
    }
    for kind, findings in kinds.items():
        assert findings[0].kind == kind
        assert findings[0].share > 0.3
    assert found(job(1, all_more={DATA: 0.01}))[0].kind == "data"


def test_one_rank_that_saves_slowly_is_named() -> None:
    first = found(job(3, slow=1, more={CHECKPOINT: 0.2}, every=10))[0]
    assert (first.ranks, first.cause) == ((1,), "checkpoint")


def test_the_clock_of_another_host_is_corrected() -> None:
    records = job(2, slow=1, more={DATA: 0.006})
    ahead = 1234.5
    moved = Record(
        facts=records[0].facts,
        steps=[step._replace(start=step.start + ahead) for step in records[0].steps],
        notes=[{"kind": "clock", "ahead": ahead, "error": 1e-4}],
        now=records[0].now,
    )
    assert found([moved, records[1]])[0].ranks == (1,)


def test_an_exchange_inside_backward_is_estimated() -> None:
    records = job(2, slow=1, more={SCRIPT: 0.006})
    inside = [
        Record(facts=one.facts, steps=[_within_backward(step) for step in one.steps], notes=[], now=one.now)
        for one in records
    ]
    table = table_of(inside)
    assert table.is_estimated
    first = findings_of(table, ["one", "one"])[0]
    assert (first.ranks, first.cause) == ((1,), "script")


def _within_backward(step: Step) -> Step:
    parts = list(step.parts)
    parts[BACKWARD] += parts[EXCHANGE]
    parts[EXCHANGE] = 0.0
    return step._replace(parts=tuple(parts), arrival=0.0)


def test_every_finding_has_words_in_both_languages() -> None:
    seen: list[Finding] = []
    for _, how in CAUSES:
        seen += found(job(3, slow=1, **how))
    seen += found(job(3, all_more={DATA: 0.01}))
    seen += found(job(3, transfer=0.02))
    seen += found(job(3, all_more={CHECKPOINT: 0.01}))
    seen += found(job(3, slow=1, more={CHECKPOINT: 0.2}, every=10))
    for finding in seen:
        for language in TITLES:
            sentence = words.finding_in_words(finding, language)
            assert words.percent(finding.share) in sentence
            assert words.advice(finding, language)
            assert duration(finding.predicted_seconds) in words.gain(finding, language)


def test_saves_are_told_in_chinese_and_warnings_stay_in_english() -> None:
    assert words.event_in_words("saved runs/a/checkpoint-000003", "zh") == "已保存 runs/a/checkpoint-000003"
    assert words.event_in_words("ranks 0, 2-3: saving runs/a", "zh") == "ranks 0, 2-3: 正在保存 runs/a"
    for text in ("rank 1: saved by nobody", "this rank works 50% longer than the others"):
        assert words.event_in_words(text, "zh") == text
    assert words.event_in_words("saved runs/a", "en") == "saved runs/a"


def test_both_languages_have_the_same_texts() -> None:
    for texts in (TITLES, PART_NAMES):
        assert texts["en"].keys() == texts["zh"].keys()


def test_runs_are_compared_by_samples_where_all_of_them_count_them() -> None:
    def speed(num_ranks: int, seconds: float, samples: float) -> RunSpeed:
        name = str(num_ranks)
        return RunSpeed(name=name, num_ranks=num_ranks, step_seconds=seconds, samples_per_second=samples, parts={})

    # Four ranks take twice as long for a step of eight times as many samples.
    assert times_faster([speed(4, 0.2, 400.0), speed(1, 0.1, 100.0)]) == [4.0, 1.0]
    assert times_faster([speed(4, 0.2, 0.0), speed(1, 0.1, 100.0)]) == [0.5, 1.0]


def test_parts_and_waiting_add_up() -> None:
    table: StepTable = table_of(job(4, slow=2, more={DATA: 0.006}))
    assert (table.waiting <= table.parts[:, :, EXCHANGE] + 1e-12).all()
    # The rank that is last waits for nobody.
    assert table.waiting[table.last, range(table.num_steps)].max() == 0.0
    assert table.transfer.min() >= -1e-12


@pytest.mark.parametrize("place", [0, NUM_STEPS - 1])
def test_the_first_step_and_the_last_one_do_not_count(place: int) -> None:
    usual = job(2, slow=1, more={DATA: 0.006})
    late = [_with_longer(record, place, SCRIPT, 100.0 if record.facts["rank"] == 0 else 0.0) for record in usual]
    assert found(late)[0].ranks == (1,)
    assert table_of(late).steady().num_steps == NUM_STEPS - 2


def _with_longer(record: Record, place: int, part: int, seconds: float) -> Record:
    step = record.steps[place]
    parts = tuple(one + seconds * (number == part) for number, one in enumerate(step.parts))
    steps = list(record.steps)
    steps[place] = step._replace(parts=parts, arrival=step.arrival + seconds)
    return Record(facts=record.facts, steps=steps, notes=[], now=record.now)


def test_steps_are_compared_by_number_where_a_rank_has_lost_some() -> None:
    whole, gap = job(2, slow=1, more={DATA: 0.006})
    lost = replace(gap, steps=[*gap.steps[:10], *gap.steps[30:]])
    table = table_of([whole, lost])
    assert table.num_steps == NUM_STEPS - 20
    assert table.start[0].tolist() == table.start[1].tolist()
    assert found([whole, lost])[0].ranks == (1,)


def test_ranks_that_have_recorded_fewer_steps_than_they_made_are_named(tmp_path: Path) -> None:
    records = [replace(one, now=replace(one.now, num_steps=NUM_STEPS)) for one in job(3)]
    records[1] = replace(records[1], steps=[*records[1].steps[:10], *records[1].steps[30:]])
    records[2] = replace(records[2], steps=records[2].steps[:5])
    run = RunRecords(folder=tmp_path, ranks=tuple(records), missing=(), num_restarts=0, events=())
    assert run.incomplete == [(2, 5, NUM_STEPS), (1, NUM_STEPS - 20, NUM_STEPS)]
    (said,) = page._notes(run, TITLES["en"], is_estimated=False)
    assert said.endswith(f": rank 2 has recorded 5 of {NUM_STEPS}, rank 1 has recorded 40 of {NUM_STEPS}.")


def test_what_takes_most_of_the_time_is_said_where_nothing_stands_out() -> None:
    table = table_of(job(2, all_more={SCRIPT: 0.05})).steady()
    assert words.largest_in_words(table.mean_parts(), "en") == "the rest of the script takes 77 % of the time"
    usual = table_of(job(2)).steady()
    assert words.largest_in_words(usual.mean_parts(), "en").startswith("computing takes")
    assert words.largest_in_words(usual.mean_parts(), "zh").startswith("计算占")


def test_waiting_within_an_update_is_not_waiting_for_gradients() -> None:
    # Rank 0 has waited for gradients for 0.5 ms, though by the clocks it came 1 ms earlier, and 2 ms within the update.
    rows = ({OPTIMIZER: 0.001, EXCHANGE: 0.0025}, {OPTIMIZER: 0.003, EXCHANGE: 0.0})
    records = [
        Record(facts=one.facts, steps=[_updating(step, parts) for step in one.steps], notes=[], now=one.now)
        for one, parts in zip(job(2), rows, strict=True)
    ]
    table = table_of(records)
    assert table.waiting_for_gradients.tolist() == [[pytest.approx(0.0005)] * NUM_STEPS, [0.0] * NUM_STEPS]
    assert table.waiting_late.tolist() == [[pytest.approx(0.002)] * NUM_STEPS, [0.0] * NUM_STEPS]
    assert table.last_late.tolist() == [1] * NUM_STEPS


def _updating(step: Step, times: dict[int, float]) -> Step:
    parts = tuple(times.get(number, 0.0) for number in range(len(PARTS)))
    is_early = times[EXCHANGE] > 0.0
    return step._replace(parts=parts, arrival=0.009 if is_early else 0.01, late_exchange=0.002 * is_early)


def test_of_two_ranks_one_is_named_only_if_it_causes_most_of_the_waiting() -> None:
    first, second = (job(2, slow=rank, more={DATA: 0.01}) for rank in (0, 1))
    by_turns = [
        Record(
            facts=one.facts,
            steps=[mine if mine.number % 3 == 0 else other for mine, other in zip(one.steps, two.steps, strict=True)],
            notes=[],
            now=one.now,
        )
        for one, two in zip(first, second, strict=True)
    ]
    # Two thirds: with more ranks that would be enough.
    assert [(one.kind, one.cause) for one in found(by_turns)] == [("turns", None)]


@pytest.mark.parametrize(("queued", "cause"), [(0.006, "shared processor"), (0.003, None)])
def test_ranks_that_wait_in_turn_for_a_processor_are_said_to_share_it(queued: float, cause: str | None) -> None:
    halves = [job(2, slow=rank, more={BACKWARD: 0.01}, queued=queued) for rank in (0, 1)]
    by_turns = [
        Record(
            facts=one.facts,
            steps=[mine if mine.number % 2 else other for mine, other in zip(one.steps, two.steps, strict=True)],
            notes=[],
            now=one.now,
        )
        for one, two in zip(*halves, strict=True)
    ]
    (finding,) = found(by_turns)
    assert (finding.kind, finding.cause) == ("turns", cause)
    assert ("other processes use their processors too" in words.finding_in_words(finding, "en")) == (cause is not None)
    assert ("处理器还被其他进程占用" in words.finding_in_words(finding, "zh")) == (cause is not None)
    assert ("cores of your own" in words.advice(finding, "en")) == (cause is not None)


def test_one_rank_alone_exchanges_nothing() -> None:
    assert found(job(1, transfer=0.02)) == []
