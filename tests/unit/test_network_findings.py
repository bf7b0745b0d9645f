# SPDX-License-Identifier: Apache-2.0
"""Which link between hosts is slow, by what their ranks have noted; and what a report says of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from test_findings import NUM_STEPS, job

from rankwise.charts import duration
from rankwise.insight import words
from rankwise.insight.findings import findings_of
from rankwise.insight.html import TITLES
from rankwise.insight.network import SlowNetwork, Traffic, as_json, links_of, slow_network
from rankwise.insight.page import page_of
from rankwise.insight.run_records import RunRecords
from rankwise.insight.step_table import table_of
from rankwise.meter import DATA

if TYPE_CHECKING:
    from rankwise.insight.step_record import Record

MEGABYTES = 10**6
USUAL = {"busy_seconds": 1.0, "bytes_per_second": 1e9}
SLOW = {"busy_seconds": 8.0, "bytes_per_second": 2e7}
"""As USUAL, for as many bytes."""
QUEUED = {"busy_seconds": 3.0, "bytes_per_second": 1e9}
"""Data that was sent at once, but whose acknowledgements came behind the data of the other direction."""
DISTANT = {"busy_seconds": 8.0, "bytes_per_second": 2e7, "round_trip_seconds": 0.02, "least_round_trip_seconds": 0.02}
LOSING = {"busy_seconds": 8.0, "bytes_per_second": 1e9, "retransmitted": 2000}


def traffic(source: str, destination: str, **facts: float) -> Traffic:
    usual = Traffic(
        local=f"10.0.0.{ord(source)}",
        remote=f"10.0.0.{ord(destination)}",
        sent_bytes=100 * MEGABYTES,
        busy_seconds=1.0,
        segments=70_000,
        retransmitted=1,
        round_trip_seconds=0.0003,
        least_round_trip_seconds=0.0001,
        bytes_per_second=1e9,
    )
    return replace(usual, **facts)  # type: ignore[arg-type]


def noted(hosts: str, ways: dict[str, dict[str, float]], **how: float) -> list[Record]:
    """Return the records of a rank on each host, named by a letter, and of what was sent each way: ``"ab"``."""
    records = job(len(hosts), **how)  # type: ignore[arg-type]
    for host, record in zip(hosts, records, strict=True):
        record.facts["hostname"] = host
        sent = [traffic(*way, **facts) for way, facts in ways.items() if way[0] == host]
        first = [
            replace(one, sent_bytes=one.sent_bytes // 100, busy_seconds=0.0, segments=0, retransmitted=0)
            for one in sent
        ]
        for steps, note in ((1, first), (NUM_STEPS, sent)):
            record.notes.append({"kind": "network", "steps": steps, "traffic": [as_json(one) for one in note]})
    return records


def judged(hosts: str, ways: dict[str, dict[str, float]]) -> SlowNetwork | None:
    return slow_network(links_of(noted(hosts, ways)))


@pytest.mark.parametrize("slow", [SLOW, LOSING, DISTANT])
def test_of_two_directions_the_slow_one_is_named(slow: dict[str, float]) -> None:
    found = judged("ab", {"ab": QUEUED, "ba": slow})
    assert found is not None
    assert (found.extent, found.hosts) == ("one way", ("b", "a"))
    assert found.times_slower == pytest.approx(8 / 3, rel=0.01)


@pytest.mark.parametrize("both", [USUAL, SLOW, DISTANT, LOSING])
def test_of_two_equal_directions_none_is_named(both: dict[str, float]) -> None:
    found = judged("ab", {"ab": both, "ba": both})
    assert found is not None
    assert (found.extent, found.hosts, found.times_slower) == ("all", ("a", "b"), 1.0)


def test_waiting_for_acknowledgements_alone_does_not_make_a_link_slow() -> None:
    found = judged("ab", {"ab": USUAL, "ba": QUEUED})
    assert found is not None
    assert found.extent == "all"


def test_of_three_hosts_the_one_that_all_slow_links_have_in_common_is_named() -> None:
    ways = [one + other for one in "abc" for other in "abc" if one != other]
    cases: dict[str, tuple[tuple[str, ...], str, tuple[str, ...]]] = {
        "of": (("ab", "ba", "bc", "cb"), "host", ("b",)),
        "from": (("ba", "bc"), "from", ("b",)),
        "to": (("ab", "cb"), "to", ("b",)),
        "between": (("ab", "ba"), "both ways", ("a", "b")),
        "one": (("cb",), "one way", ("c", "b")),
    }
    for slow, extent, hosts in cases.values():
        found = judged("abc", {way: SLOW if way in slow else USUAL for way in ways})
        assert found is not None
        assert (found.extent, found.hosts) == (extent, hosts)


def test_in_a_ring_a_distant_host_is_named() -> None:
    # Data goes around; the other way there are messages only, which are not judged.
    few = {"sent_bytes": MEGABYTES, **DISTANT}
    ring = {"ab": DISTANT, "bc": DISTANT, "ca": USUAL}
    found = judged("abc", {**ring, "ba": few, "cb": few, "ac": few})
    assert found is not None
    assert (found.extent, found.hosts) == ("host", ("b",))


def test_what_tcp_does_not_carry_is_unknown() -> None:
    assert judged("ab", {}) is None
    # Ranks gave collectives far more than went over these connections.
    records = noted("ab", {"ab": {**SLOW, "sent_bytes": 1000}, "ba": {**USUAL, "sent_bytes": 1000}})
    assert not any(link.is_judged for link in links_of(records))
    assert slow_network(links_of(records)) is None
    assert TITLES["en"]["unknown"] in page(records)
    assert TITLES["en"]["no network"] in page(noted("ab", {}))


def test_a_connection_that_was_closed_still_counts() -> None:
    records = noted("ab", {"ab": USUAL, "ba": SLOW})
    for record, left in zip(records, ("ab", "ba"), strict=True):
        others = [as_json(traffic(*left, sent_bytes=10, busy_seconds=0.0))]
        record.notes.append({"kind": "network", "steps": NUM_STEPS, "traffic": others})
    assert {link.sent_bytes for link in links_of(records)} == {99 * MEGABYTES}


def test_a_rank_that_was_killed_is_judged_by_the_steps_up_to_its_last_note() -> None:
    records = noted("ab", {"ab": USUAL, "ba": {**SLOW, "busy_seconds": 0.6}}, transfer=0.05)
    for record in records:
        record.notes[-1]["steps"] = NUM_STEPS // 4
    first = findings_of(table_of(records), ["a", "b"], links_of(records))[0]
    assert first.network is not None
    assert first.network.slowest.num_steps == NUM_STEPS // 4 - 1


def test_addresses_that_no_rank_has_are_no_hosts() -> None:
    links = links_of(noted("ab", {"ab": USUAL, "ba": USUAL, "az": SLOW, "aa": SLOW}))
    assert [(link.source, link.destination) for link in links] == [("a", "b"), ("b", "a")]


def test_the_exchange_is_explained_by_the_network_where_that_takes_the_time() -> None:
    # 60 steps of 65 ms, of which 50 ms are the exchange.
    slow = {**SLOW, "busy_seconds": 2.9}
    records = noted("ab", {"ab": USUAL, "ba": slow}, transfer=0.05)
    first = findings_of(table_of(records), ["a", "b"], links_of(records))[0]
    assert first.kind == "exchange"
    sentence = words.finding_in_words(first, "en")
    assert "the network from b to a sends 34.1 MB/s, and is at least 2.9 times as slow as the other way." in sentence
    assert first.step_seconds - first.predicted_seconds == pytest.approx(0.05 * (1 - 1 / 2.9), rel=0.05)
    assert "if it were as fast as the other way" in words.gain(first, "en")
    # The ranks were busy for a small part of the exchange: it is not the network that they wait for.
    records = noted("ab", {"ab": USUAL, "ba": {**SLOW, "busy_seconds": 1.2}}, transfer=0.05)
    first = findings_of(table_of(records), ["a", "b"], links_of(records))[0]
    assert (first.kind, first.network) == ("exchange", None)


def test_a_slow_rank_is_named_before_a_network_that_takes_less() -> None:
    records = noted("ab", {"ab": USUAL, "ba": SLOW}, transfer=0.005, slow=1, more={DATA: 0.05})  # type: ignore[arg-type]
    first = findings_of(table_of(records), ["a", "b"], links_of(records))[0]
    assert (first.kind, first.ranks, first.cause) == ("slow ranks", (1,), "data")


def test_who_receives_over_a_slow_link_is_not_called_slow() -> None:
    records = noted("ab", {"ab": USUAL, "ba": SLOW}, transfer=0.1)
    late = 0.06
    # Rank 0 leaves each exchange 60 ms after rank 1, and reaches the next one as much later.
    records[0] = replace(records[0], steps=[step._replace(start=step.start + late) for step in records[0].steps])
    findings = findings_of(table_of(records), ["a", "b"], links_of(records))
    assert [one.kind for one in findings] == ["exchange"]
    assert findings[0].network is not None
    assert "slow ranks" in {one.kind for one in findings_of(table_of(records), ["a", "b"])}


def test_each_extent_has_words_in_both_languages() -> None:
    ways = [one + other for one in "abc" for other in "abc" if one != other]
    some: list[tuple[str, ...]] = [("ab", "ba", "bc", "cb"), ("ba", "bc"), ("ab", "cb"), ("ab", "ba"), ("cb",), ()]
    seen = set()
    for slow in some:
        records = noted("abc", {way: LOSING if way in slow else USUAL for way in ways}, transfer=0.03)
        first = findings_of(table_of(records), ["a", "b", "c"], links_of(records))[0]
        assert first.network is not None
        seen.add(first.network.extent)
        for language in TITLES:
            assert words.percent(first.share) in words.finding_in_words(first, language)
            assert words.advice(first, language)
            assert duration(first.predicted_seconds) in words.gain(first, language)
    assert seen == {"one way", "both ways", "from", "to", "host", "all"}


def page(records: list[Record]) -> str:
    """Return the page about a run."""
    return page_of(run_of(records), "en").html


def run_of(records: list[Record]) -> RunRecords:
    """Return the run that these are the records of."""
    for record in records:
        record.facts.setdefault("hostname", "a")
        record.facts.update(
            started=0.0, script="train.py", device="cpu", backend="gloo", source="torchrun", times="host"
        )
        record.facts.update(dict.fromkeys(("threads", "cores", "python", "torch", "rankwise", "pid"), 1))
    return RunRecords(folder=Path(), ranks=tuple(records), missing=(), num_restarts=0, events=())


def test_the_page_has_a_row_for_each_link() -> None:
    html = page(noted("ab", {"ab": USUAL, "ba": SLOW}))
    for cell in ("a → b", "b → a", "12.4 MB/s", "300 µs"):
        assert cell in html
