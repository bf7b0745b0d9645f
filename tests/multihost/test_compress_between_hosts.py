# SPDX-License-Identifier: Apache-2.0
"""Compressed gradients between hosts, whose processors are unlike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from hosts import Hosts

COMPRESSED = Path(__file__).with_name("compressed.py")


@pytest.mark.parametrize(("ranks_per_host", "check", "how"), [(2, "0", "SharedMemory"), (1, "1", "TorchGroup")])
def test_different_processors_compute_the_same_bits_near_exact_gradients(
    hosts: Hosts, ranks_per_host: int, check: str, how: str
) -> None:
    all_ended = hosts.run_ranks(COMPRESSED, ranks_per_host, env={"RANKWISE_CHECK": check})
    assert [ended.exit_code for ended in all_ended] == [0] * 2 * ranks_per_host, all_ended
    said = [json.loads(ended.stdout) for ended in all_ended]
    assert {one["how"] for one in said} == {how}
    assert said[0]["product"] != said[-1]["product"], "the last host computes like the others: nothing is shown"
    assert all(one["found"] == said[0]["found"] for one in said)
    assert all(of_method["is_near"] for of_method in said[0]["found"].values()), said[0]["found"]
