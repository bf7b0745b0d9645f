# SPDX-License-Identifier: Apache-2.0
"""What ``rankwise top`` and ``run --progress`` make of the answer of a launcher."""

from __future__ import annotations

import json
import math
import os
from typing import TYPE_CHECKING, Any

import pytest

from rankwise.cli.top import table
from rankwise.insight.step_record import LoggedValue, RecordFile, Step, row_of
from rankwise.launch.inspect.stacks import line_of, paces, steps_as_json
from rankwise.meter import DATA, EXCHANGE, PARTS

if TYPE_CHECKING:
    from pathlib import Path


def pace(rank: int, host: str = "gpu-1", own_seconds: float = 0.01, **values: float | str) -> dict[str, Any]:
    return {
        "steps": 100 + rank,
        "host": host,
        "world_size": 8,
        "step_seconds": 0.02,
        "parts": dict.fromkeys(PARTS, 0.0) | {"data": 0.005, "forward": 0.005, "exchange": 0.01},
        "own_seconds": own_seconds,
        "memory_bytes": 300 * 2**20,
        "samples": 8.0,
        "values": values,
        "means": dict.fromkeys(values, 1.5),
        "now": "exchange",
        "seconds_in_step": 0.1,
    }


def test_a_table_of_one_host_has_no_column_for_it() -> None:
    assert table(steps_as_json([{0: pace(0, loss=1.25), 1: pace(1, loss=1.75)}], [])) == (
        "rank  steps  steps/s     step  data  compute  exchange  rest   memory              now  loss\n"
        "   0    100     50.0  20.0 ms   25%      25%       50%    0%  300 MiB  exchange, 0.1 s  1.25\n"
        "   1    101     50.0  20.0 ms   25%      25%       50%    0%  300 MiB  exchange, 0.1 s  1.75\n"
        "\n"
        "loss 1.5\n"
    )


def test_ranks_of_all_hosts_are_in_order_each_with_its_host() -> None:
    answer = steps_as_json([{2: pace(2, "gpu-2")}, {0: pace(0), 1: pace(1)}], [])
    head, *rows = table(answer).splitlines()
    assert head.split()[:2] == ["rank", "host"]
    assert [row.split()[:2] for row in rows] == [["0", "gpu-1"], ["1", "gpu-1"], ["2", "gpu-2"]]


def test_a_host_that_did_not_answer_is_named_in_one_line() -> None:
    answer = steps_as_json([{0: pace(0, loss=1.0)}], ["gpu-2", "gpu-3"])
    shown = table(answer).splitlines()
    assert shown[0].split()[:2] == ["rank", "host"]
    assert shown[-1] == "gpu-2, gpu-3 did not answer"
    assert line_of(answer) == "step 100, 50.0 steps/s, loss 1.5, gpu-2, gpu-3 did not answer"
    assert table(steps_as_json([], ["gpu-2"])) == "no rank has completed a step yet\ngpu-2 did not answer\n"
    assert line_of(steps_as_json([], ["gpu-2"])) == ""


def test_the_line_has_the_fewest_steps_and_the_slowest_rank_of_all_hosts() -> None:
    parts = [{0: pace(5, loss=1.0), 1: pace(3)}, {2: pace(7, "gpu-2", own_seconds=0.015)}]
    assert line_of(steps_as_json(parts, [])) == "step 103, 50.0 steps/s, loss 1.5, slowest: rank 2 on gpu-2"
    assert line_of(steps_as_json(parts[:1], [])) == "step 103, 50.0 steps/s, loss 1.5, slowest: rank 0"


def test_a_value_that_is_not_finite_is_shown_on_its_rank() -> None:
    ranks = {0: pace(0, loss=1.0), 1: pace(1, loss="nan"), 2: pace(2, loss="inf"), 3: pace(3)}
    for one in ranks.values():
        one["means"] = {"loss": "nan"}
    answer = steps_as_json([ranks], [])
    rows = table(answer).splitlines()
    assert [row.split()[-1] for row in rows[1:5]] == ["1", "nan", "inf", "s"], "rank 3 has no value"
    assert rows[-1] == "loss nan"
    assert "loss nan (ranks 1-2), slowest" in line_of(answer)


def test_three_values_have_a_column_first_those_that_are_not_finite() -> None:
    answer = steps_as_json([{0: pace(0, a=1.0, b=2.0, c=3.0, d=4.0), 1: pace(1, a=1.0, b=2.0, c=3.0, d="nan")}], [])
    assert table(answer).splitlines()[0].split()[-4:] == ["now", "d", "a", "b"]
    assert len(table(answer).splitlines()) == 3 + 1 + 4, "each has its mean below"


def test_as_many_values_have_a_column_as_the_terminal_is_wide() -> None:
    answer = steps_as_json([{0: pace(0, a=1.0, b=2.0, c=3.0)}], [])
    whole = len(table(answer).splitlines()[0])
    for columns, names in ((whole, ["a", "b", "c"]), (whole - 1, ["a", "b"]), (40, ["a"])):
        head, row, *_ = table(answer, os.terminal_size((columns, 24))).splitlines()
        assert head.split()[10:] == names
        assert len(row) == len(head)


def test_a_low_terminal_shows_the_ranks_that_matter() -> None:
    ranks = {rank: pace(rank, own_seconds=0.01 + 0.001 * (rank == 5), loss=1.0) for rank in range(64)}
    ranks[60]["values"]["loss"] = "nan"
    shown = table(steps_as_json([ranks], []), os.terminal_size((200, 24))).splitlines()
    assert len(shown) == 24
    numbers = [row.split()[0] for row in shown[1:21]]
    assert {"5", "60"} < set(numbers)
    assert numbers == sorted(numbers, key=int)
    assert shown[21].startswith("not shown: ranks ")
    assert shown[21].endswith(", which work less")
    assert shown[22:] == ["", "loss 1.5"]
    assert len(table(steps_as_json([ranks], [])).splitlines()) == 1 + 64 + 2


def test_paces_are_read_from_records_and_are_json(tmp_path: Path) -> None:
    for rank in (0, 1):
        record = RecordFile(str(tmp_path / f"{rank}"), {"hostname": "gpu-1", "world_size": 2})
        parts = [0.0] * len(PARTS)
        parts[EXCHANGE] = 0.001
        for number, data_seconds in ((1, 5.0), (2, 0.003)):
            parts[DATA] = data_seconds
            record.add(row_of(Step(number, 10.0 + number, tuple(parts), 0.0, 0.0, 0.0, 0.0, 8, 0, 2**20, 0)))
        record.show_values({"loss": LoggedValue(math.nan if rank else 1.0, math.nan), "x": LoggedValue(None, 2.0)})
    found = paces({0: tmp_path / "0", 1: tmp_path / "1", 2: tmp_path / "missing"})
    answer = json.loads(json.dumps(steps_as_json([found], []), allow_nan=False))
    assert answer["ranks"].keys() == {"0", "1"}
    assert [answer["ranks"][rank]["values"] for rank in ("0", "1")] == [{"loss": 1.0}, {"loss": "nan"}]
    assert answer["values"] == {"loss": "nan", "x": 2.0}
    assert [answer["ranks"][rank]["step_seconds"] for rank in ("0", "1")] == pytest.approx([0.004] * 2), "not the first"
    assert (answer["ranks"]["1"]["host"], answer["ranks"]["1"]["steps"]) == ("gpu-1", 2)
